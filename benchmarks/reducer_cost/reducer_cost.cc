// What a reducer costs per parameter, in a world of 1: nothing is transferred,
// so all of it is the reducer's own work.
//
// Benchmarks, over the number of parameters (4 floats each)
//   step/no_reducer            two equal models without one, as below: what of
//   the
//                              following is noise
//   step/alone, step/gloo      a training step with a reducer, less the same
//   step
//                              of an equal model without one.  Both take turns;
//                              us_per_parameter is the median of the
//                              differences, [p25, p75] their quartiles.  "Time"
//                              is the step with the reducer.
//   construct/default_caps, construct/one_bucket
//   construct/8000_over_1000   ratio of the costs per parameter, in one bucket
//   plan                       plan_by_size
//   copies                     per step, in units of all gradients; counted
//   allocations                of tensor memory by the reducer, from step 3 on;
//                              heap_per_step: its other allocations, autograd's
//                              for its hooks and the group's included; counted
//   collectives/k              per micro-batch and bucket, when k micro-batches
//   are
//                              accumulated; counted
// cpu_us and cpu_ratio are the medians in CPU time of the process, which other
// programs on the machine disturb less.
//
// A count that is not what brigade promises is reported as an error.

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "brigade/benchmarks/reducer_cost/allocation_counter.h"
#include "brigade/benchmarks/reducer_cost/heap_counter.h"
#include "brigade/benchmarks/reducer_cost/tiny_model.h"
#include "brigade/bucket_sweep/quantiles.h"
#include "brigade/benchmarks/support/set_up.h"
#include "brigade/comm/process_group.h"
#include "brigade/planning/plan_by_size.h"
#include "brigade/reducer/reducer.h"

namespace brigade::benchmarks {
namespace {

using ::benchmark::State;
using Clock = std::chrono::steady_clock;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

Group alone() { return single_process_group({at::kCPU}); }

Group gloo() {
  return make_process_group(c10::make_intrusive<c10d::HashStore>(), /*rank=*/0,
                            /*world_size=*/1);
}

ReducerOptions one_bucket() {
  ReducerOptions options;
  options.bucket_caps_bytes = {std::numeric_limits<int64_t>::max()};
  return options;
}

struct Seconds {
  double wall = 0;
  double cpu = 0;  // of all threads of the process
};

double cpu_seconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) +
         static_cast<double>(time.tv_nsec) * 1e-9;
}

Seconds seconds(const std::function<void()>& work) {
  const double cpu_begin = cpu_seconds();
  const Clock::time_point begin = Clock::now();
  work();
  const std::chrono::duration<double> wall = Clock::now() - begin;
  return {.wall = wall.count(), .cpu = cpu_seconds() - cpu_begin};
}

// Leaves no gradient behind: what one model frees late, the other one's forward
// would find hot, and the difference of the two would be the allocator's.
void train_step(TinyModel& model, Reducer* reducer) {
  {
    const at::Tensor loss = model.forward();
    if (reducer != nullptr) reducer->prepare_for_backward(loss);
    loss.backward();
  }
  model.clear_gradients();
}

std::vector<double> wall_of(const std::vector<Seconds>& samples) {
  std::vector<double> wall;
  for (const Seconds& sample : samples) wall.push_back(sample.wall);
  return wall;
}

std::vector<double> cpu_of(const std::vector<Seconds>& samples) {
  std::vector<double> cpu;
  for (const Seconds& sample : samples) cpu.push_back(sample.cpu);
  return cpu;
}

void report_us_per_parameter(State& state, const std::vector<Seconds>& samples,
                             int64_t num_parameters) {
  const Quartiles wall = quartiles(wall_of(samples));
  const double scale = 1e6 / static_cast<double>(num_parameters);
  state.counters["us_per_parameter"] = wall.median * scale;
  state.counters["p25"] = wall.p25 * scale;
  state.counters["p75"] = wall.p75 * scale;
  state.counters["cpu_us"] = quantile(cpu_of(samples), 0.5) * scale;
}

// Enough of them that their quartiles mean something, but not for minutes.
int64_t num_pairs(int64_t num_parameters) {
  return std::clamp<int64_t>(200'000 / num_parameters, 5, 300);
}

// `make_group` null: no reducer.
void step(State& state, Group (*make_group)()) {
  const int64_t num_parameters = state.range(0);
  TinyModel plain(num_parameters);
  TinyModel reduced(num_parameters);
  std::optional<Reducer> made;
  if (make_group != nullptr) made.emplace(reduced.parameters(), make_group());
  Reducer* const reducer = made ? &*made : nullptr;
  for (int i = 0; i < 3; ++i) {  // the plan is rebuilt after the first
    train_step(plain, nullptr);
    train_step(reduced, reducer);
  }
  std::vector<Seconds> differences;
  bool plain_first = true;
  for (auto _ : state) {
    Seconds without;
    if (plain_first) without = seconds([&] { train_step(plain, nullptr); });
    const Seconds with = seconds([&] { train_step(reduced, reducer); });
    if (!plain_first) without = seconds([&] { train_step(plain, nullptr); });
    plain_first = !plain_first;
    state.SetIterationTime(with.wall);
    differences.push_back(
        {.wall = with.wall - without.wall, .cpu = with.cpu - without.cpu});
  }
  report_us_per_parameter(state, differences, num_parameters);
}

Seconds construction_seconds(const TinyModel& model, const Group& group,
                             const ReducerOptions& options) {
  std::unique_ptr<Reducer> reducer;
  return seconds([&] {
    reducer = std::make_unique<Reducer>(model.parameters(), group, options);
  });
}

void construct(State& state, const ReducerOptions& options) {
  const TinyModel model(state.range(0));
  const Group group = alone();
  std::vector<Seconds> times;
  for (auto _ : state) {
    times.push_back(construction_seconds(model, group, options));
    state.SetIterationTime(times.back().wall);
  }
  report_us_per_parameter(state, times, state.range(0));
}

void construct_8000_over_1000(State& state) {
  const TinyModel large(8000);
  const TinyModel small(1000);
  const Group group = alone();
  std::vector<double> ratios;
  std::vector<double> cpu_ratios;
  for (auto _ : state) {
    const Seconds of_large = construction_seconds(large, group, one_bucket());
    const Seconds of_small = construction_seconds(small, group, one_bucket());
    state.SetIterationTime(of_large.wall + of_small.wall);
    ratios.push_back(of_large.wall / 8 / of_small.wall);
    cpu_ratios.push_back(of_large.cpu / 8 / of_small.cpu);
  }
  const Quartiles found = quartiles(ratios);
  state.counters["ratio"] = found.median;
  state.counters["p25"] = found.p25;
  state.counters["p75"] = found.p75;
  state.counters["cpu_ratio"] = quantile(cpu_ratios, 0.5);
}

void plan(State& state) {
  const std::vector<ParameterSpec> parameters(state.range(0),
                                              ParameterSpec{.size_bytes = 16});
  const std::vector<size_t> order =
      reverse_registration_order(parameters.size());
  std::vector<Seconds> times;
  for (auto _ : state) {
    times.push_back(seconds([&] {
      benchmark::DoNotOptimize(
          plan_by_size(parameters, order, kDefaultBucketCapsBytes));
    }));
    state.SetIterationTime(times.back().wall);
  }
  report_us_per_parameter(state, times, state.range(0));
}

void copies(State& state) {
  TinyModel model(state.range(0));
  Reducer reducer(model.parameters(), alone());
  train_step(model, &reducer);
  train_step(model, &reducer);
  const ReducerStatistics before = reducer.statistics();
  for (auto _ : state) train_step(model, &reducer);
  const ReducerStatistics after = reducer.statistics();
  const auto bytes =
      static_cast<double>(after.bytes_packed - before.bytes_packed +
                          after.bytes_delivered - before.bytes_delivered);
  const double copies_per_step =
      bytes / static_cast<double>(state.iterations() * model.gradient_bytes());
  state.counters["copies_per_step"] = copies_per_step;
  if (copies_per_step > 1.05)
    state.SkipWithError("more than 1.05 copies a step");
}

void allocations(State& state) {
  TinyModel plain(state.range(0));
  TinyModel reduced(state.range(0));
  Reducer reducer(reduced.parameters(), alone());
  for (int i = 0; i < 2; ++i) {
    train_step(plain, nullptr);
    train_step(reduced, &reducer);
  }
  const AllocationCounter counter;
  const auto allocations_of = [&](const std::function<void()>& work) {
    const int64_t before = counter.count();
    work();
    return counter.count() - before;
  };
  int64_t extra = 0;
  int64_t by_autograd = 0;
  int64_t on_heap = 0;
  for (auto _ : state) {
    const int64_t before = heap_allocations();
    by_autograd = allocations_of([&] { train_step(plain, nullptr); });
    const int64_t between = heap_allocations();
    extra +=
        allocations_of([&] { train_step(reduced, &reducer); }) - by_autograd;
    on_heap += heap_allocations() - between - (between - before);
  }
  state.counters["heap_per_step"] = benchmark::Counter(
      static_cast<double>(on_heap), benchmark::Counter::kAvgIterations);
  state.counters["by_autograd_per_step"] = static_cast<double>(by_autograd);
  state.counters["by_reducer"] = static_cast<double>(extra);
  if (by_autograd == 0) state.SkipWithError("the counter counts nothing");
  if (extra != 0) state.SkipWithError("the reducer allocated");
}

void collectives(State& state) {
  constexpr int64_t kNumParameters = 1000;
  const int64_t micro_batches = state.range(0);
  TinyModel model(kNumParameters);
  ReducerOptions options;
  options.bucket_caps_bytes = {4096};
  Reducer reducer(model.parameters(), alone(), options);
  train_step(model, &reducer);
  const int64_t before = reducer.statistics().buckets_launched;
  for (auto _ : state) {
    model.clear_gradients();
    for (int64_t i = 0; i < micro_batches; ++i) {
      const at::Tensor loss = model.forward();
      if (i + 1 == micro_batches) reducer.prepare_for_backward(loss);
      loss.backward();
    }
  }
  const int64_t launched = reducer.statistics().buckets_launched - before;
  const auto num_buckets = static_cast<int64_t>(reducer.plan().num_buckets());
  state.counters["per_micro_batch_and_bucket"] =
      static_cast<double>(launched) /
      static_cast<double>(state.iterations() * micro_batches * num_buckets);
  if (launched != static_cast<int64_t>(state.iterations()) * num_buckets) {
    state.SkipWithError("accumulated micro-batches launched collectives");
  }
}

void register_benchmarks() {
  const auto add = [](const std::string& name, auto&& function) {
    return benchmark::RegisterBenchmark(name.c_str(), function);
  };
  for (const int64_t n : {100, 1'000, 5'000, 100'000}) {
    const auto add_step = [&](const std::string& name, Group (*make_group)()) {
      add("step/" + name, [=](State& state) { step(state, make_group); })
          ->Arg(n)
          ->Iterations(num_pairs(n))
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    };
    add_step("no_reducer", nullptr);
    add_step("alone", alone);
    add_step("gloo", gloo);
  }
  const auto add_construct = [&](const std::string& name,
                                 const ReducerOptions& options) {
    add("construct/" + name, [=](State& state) { construct(state, options); })
        ->RangeMultiplier(10)
        ->Range(100, 100'000)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  };
  add_construct("default_caps", {});
  add_construct("one_bucket", one_bucket());
  add("construct/8000_over_1000", construct_8000_over_1000)
      ->Iterations(30)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
  add("plan", plan)
      ->RangeMultiplier(10)
      ->Range(100, 100'000)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
  add("copies", copies)->Arg(1'000)->Iterations(20);
  add("allocations", allocations)->Arg(1'000)->Arg(10'000)->Iterations(20);
  add("collectives", collectives)->Arg(1)->Arg(4)->Arg(8)->Iterations(5);
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) {
  at::set_num_threads(1);
  for (const auto& [name, value] :
       brigade::benchmarks::describe_set_up(argc, argv)) {
    benchmark::AddCustomContext(name, value);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  brigade::benchmarks::register_benchmarks();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
