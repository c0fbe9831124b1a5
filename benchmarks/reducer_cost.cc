// What a reducer costs per parameter, in a world of 1: nothing is transferred,
// so all of it is the reducer's own work.
//
// Benchmarks, over the number of parameters (4 floats each)
//   step/no_reducer            two equal models without one, as below: noise
//   step/alone, step/gloo      a training step with a reducer, less the same
//                              step of an equal model without one. Both take
//                              turns; us_per_parameter is the median of the
//                              differences, [p25, p75] their quartiles. "Time"
//                              is the step with the reducer.
//   construct/default_caps, construct/one_bucket
//   copies                     per step, in units of all gradients; counted
//   allocations                of tensor memory by the reducer, from step 3 on
//   collectives/k              per micro-batch and bucket, when k micro-batches
//                              are accumulated; counted
//
// A count that is not what brigade promises is reported as an error.

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "brigade/benchmarks/support/allocation_counter.h"
#include "brigade/benchmarks/support/set_up.h"
#include "brigade/benchmarks/support/tiny_model.h"
#include "brigade/bucket_sweep/quantiles.h"
#include "brigade/comm/process_group.h"
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

double seconds(const std::function<void()>& work) {
  const Clock::time_point begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
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

void report_us_per_parameter(State& state, const std::vector<double>& samples,
                             int64_t num_parameters) {
  const Quartiles found = quartiles(samples);
  const double scale = 1e6 / static_cast<double>(num_parameters);
  state.counters["us_per_parameter"] = found.median * scale;
  state.counters["p25"] = found.p25 * scale;
  state.counters["p75"] = found.p75 * scale;
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
  std::vector<double> differences;
  bool plain_first = true;
  for (auto _ : state) {
    double without = 0;
    if (plain_first) without = seconds([&] { train_step(plain, nullptr); });
    const double with = seconds([&] { train_step(reduced, reducer); });
    if (!plain_first) without = seconds([&] { train_step(plain, nullptr); });
    plain_first = !plain_first;
    state.SetIterationTime(with);
    differences.push_back(with - without);
  }
  report_us_per_parameter(state, differences, num_parameters);
}

void construct(State& state, const ReducerOptions& options) {
  const TinyModel model(state.range(0));
  const Group group = alone();
  std::vector<double> times;
  for (auto _ : state) {
    std::optional<Reducer> reducer;
    times.push_back(
        seconds([&] { reducer.emplace(model.parameters(), group, options); }));
    state.SetIterationTime(times.back());
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
  int64_t by_autograd = 0;
  int64_t by_reducer = 0;
  for (auto _ : state) {
    const int64_t before = counter.count();
    train_step(plain, nullptr);
    by_autograd = counter.count() - before;
    train_step(reduced, &reducer);
    by_reducer += counter.count() - before - 2 * by_autograd;
  }
  state.counters["by_reducer"] = static_cast<double>(by_reducer);
  if (by_autograd == 0) state.SkipWithError("the counter counts nothing");
  if (by_reducer != 0) state.SkipWithError("the reducer allocated");
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
        ->ArgsProduct({{100, 1'000, 8'000, 100'000}})
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  };
  add_construct("default_caps", {});
  add_construct("one_bucket", one_bucket());
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
