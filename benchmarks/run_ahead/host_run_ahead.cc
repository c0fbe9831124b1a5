// How far the host runs ahead of its device and of its peer, and what it costs
// when a host is late.
//
//   host_run_ahead [--steps 40] [--late-step 15] [--late-ms 50]
//                  [--late-every 10] [--host-ms 2] [--device-ms 5,10,20,60]
//                  [--rounds 5] [--buffers]
//
// Two ranks as threads of this process, each with a device that does in order
// what its host enqueues (device_queue.h): a step takes the host `host-ms` and
// the device `device-ms`. The collectives of the two devices wait for each
// other, the host for neither. Loops never read a result, so that a host may
// run ahead without end. With `buffers`, those of rank 0 are broadcast before
// each forward.
//
// Who is late, `late-ms` before forward:
//   nobody
//   once       rank 1, in step `late-step`
//   each       each rank once in `late-every` steps, the two in turns
// What is compared, in turns:
//   torch      c10d::Reducer
//   waiting    ours, statuses looked at where backward ends
//   deferred   ours, looked at in each prepare_for_backward, which waits where
//              32 are open
//   deferred4  where four are
//   deferred1  for each
//   silent     ours without control channel
// Columns, of rank 0, medians of `rounds` runs:
//   longest    what its longest step takes more than its median one, its own
//              lateness left out: how long it was held; and which step that is
//   held       all steps together, over the median one
//   ahead      when it comes out of a backward, at most: so many steps, and so
//              much time, before rank 1 comes out of the same one
//   run        all steps, until the devices are done; quartiles
//   / torch    ratio to torch's run of the same round; quartiles
// Fails when a gradient is wrong, or devices meet in unlike collectives.

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "brigade/benchmarks/run_ahead/device_queue.h"
#include "brigade/benchmarks/support/set_up.h"
#include "brigade/bucket_sweep/quantiles.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/support/torch_reducer.h"

namespace brigade::benchmarks {
namespace {

using Clock = DeviceQueue::Clock;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Milliseconds = std::chrono::duration<double, std::milli>;
using Parameters = std::vector<at::Tensor>;

// What a step calls.
struct Calls {
  std::function<void(std::vector<at::Tensor> buffers)> before_forward;
  std::function<void(const at::Tensor& loss)> prepare;
};

constexpr int kRanks = 2;
constexpr int kLayers = 4;
constexpr int64_t kNumel = 1024;  // of the first layer
constexpr int kWarmUpSteps = 3;

struct Options {
  int steps = 40;
  int late_step = 15;
  double late_ms = 50;
  int late_every = 10;
  double host_ms = 2;
  std::vector<double> device_ms = {5, 10, 20, 60};
  int rounds = 5;
  bool buffers = false;
};

// One bucket for each layer, the last one's gradient comes first.
std::vector<std::vector<size_t>> bucket_plan() {
  std::vector<std::vector<size_t>> plan;
  for (size_t layer = kLayers; layer-- > 0;) plan.push_back({layer});
  return plan;
}

Calls torch(const Parameters& parameters, const Group& group) {
  const auto reducer =
      testing::make_torch_reducer(parameters, bucket_plan(), group);
  return {.before_forward =
              [group](std::vector<at::Tensor> buffers) {
                c10d::broadcast_coalesced(group, buffers, size_t{250} << 20,
                                          /*rank=*/0);
              },
          .prepare =
              [reducer](const at::Tensor& loss) {
                reducer->prepare_for_backward({loss});
              }};
}

Calls ours(const Parameters& parameters, const Group& group,
           ReducerOptions options) {
  options.bucket_plan = bucket_plan();
  const auto reducer =
      std::make_shared<Reducer>(parameters, group, std::move(options));
  return {.before_forward =
              [reducer](std::vector<at::Tensor> buffers) {
                reducer->open_iteration(std::move(buffers), /*source=*/0);
              },
          .prepare =
              [reducer](const at::Tensor& loss) {
                reducer->prepare_for_backward(loss);
              }};
}

struct Arm {
  const char* name;
  std::function<Calls(const Parameters&, const Group&)> make_reducer;
};

Arm our_arm(const char* name, const ReducerOptions& options) {
  return {name, [options](const Parameters& parameters, const Group& group) {
            return ours(parameters, group, options);
          }};
}

// The first is what others are compared with.
std::vector<Arm> arms() {
  return {{"torch", torch},
          our_arm("waiting", {.defer_status_check = false}),
          our_arm("deferred", {.defer_status_check = true}),
          our_arm("deferred4", {.defer_status_check = true,
                                .max_unconfirmed_iterations = 4}),
          our_arm("deferred1", {.defer_status_check = true,
                                .max_unconfirmed_iterations = 1}),
          our_arm("silent", {.control_channel = false})};
}

struct Lateness {
  const char* name;
  std::function<bool(int rank, int step)> is_late;
};

std::vector<Lateness> latenesses(const Options& options) {
  const auto never = [](int, int) { return false; };
  const auto once = [late = options.late_step](int rank, int step) {
    return rank == 1 && step == late;
  };
  const auto each = [every = options.late_every](int rank, int step) {
    return (step + rank * every / kRanks) % every == every - 1;
  };
  return {{"nobody", never}, {"once", once}, {"each", each}};
}

// A rank whose layers take time on the host and on its device.
class Trainer {
 public:
  Trainer(int rank, DeviceMeeting& meeting,
          const c10::intrusive_ptr<c10d::Store>& store, const Arm& arm,
          const Options& options, double device_ms)
      // Backward has twice the kernels of forward.
      : host_(options.host_ms / kLayers / 3),
        device_(std::chrono::duration_cast<Clock::duration>(
            Milliseconds(device_ms / kLayers / 3))),
        queue_(rank, meeting) {
    for (int layer = 0; layer < kLayers; ++layer) {
      // Sizes tell layers apart where devices meet.
      parameters_.push_back(at::ones({kNumel + layer}).requires_grad_());
    }
    calls_ = arm.make_reducer(parameters_,
                              make_device_group(store, rank, kRanks, queue_));
    if (options.buffers) buffers_ = {at::zeros({kNumel})};
  }

  void step(int number) {
    for (const at::Tensor& parameter : parameters_) {
      parameter.mutable_grad().reset();
    }
    if (!buffers_.empty()) calls_.before_forward(buffers_);
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& parameter : parameters_) {
      launch_kernels(1);
      loss = loss + parameter.sum() * number;
      loss.register_hook([this](const at::Tensor&) { launch_kernels(2); });
    }
    calls_.prepare(loss);
    loss.backward();
    for (const at::Tensor& parameter : parameters_) {
      TORCH_CHECK(parameter.grad().eq(number).all().item<bool>(),
                  "expected gradients of ", number, ", got ",
                  parameter.grad()[0].item<float>());
    }
  }

  void synchronize() { queue_.synchronize(); }

 private:
  void launch_kernels(int count) {
    std::this_thread::sleep_for(count * host_);
    queue_.compute(count * device_);
  }

  const Milliseconds host_;
  const Clock::duration device_;
  Parameters parameters_;
  DeviceQueue queue_;
  std::vector<at::Tensor> buffers_;
  Calls calls_;  // ends first: the reducer's group enqueues
};

struct Step {
  Clock::time_point begins;  // behind its own lateness
  Clock::time_point ends;
};

struct Run {
  std::vector<Step> steps[kRanks];
  double total_ms = 0;  // until rank 0's device is done
};

double milliseconds(Clock::duration time) { return Milliseconds(time).count(); }

Run measure(const Arm& arm, const Lateness& lateness, double device_ms,
            const Options& options) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  DeviceMeeting meeting(kRanks);
  std::barrier all(kRanks);
  Run run;
  const auto train = [&](int rank) {
    Trainer trainer(rank, meeting, store, arm, options, device_ms);
    for (int i = 1; i <= kWarmUpSteps; ++i) trainer.step(i);
    trainer.synchronize();
    all.arrive_and_wait();
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < options.steps; ++i) {
      if (lateness.is_late(rank, i)) {
        std::this_thread::sleep_for(Milliseconds(options.late_ms));
      }
      const Clock::time_point begins = Clock::now();
      trainer.step(i + 1);
      run.steps[rank].push_back({.begins = begins, .ends = Clock::now()});
    }
    trainer.synchronize();
    if (rank == 0) run.total_ms = milliseconds(Clock::now() - start);
    all.arrive_and_wait();  // one that leaves is an error of its peer's
  };
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] { train(rank); });
    }
  }
  return run;
}

struct Summary {
  std::vector<double> longest_ms;
  std::vector<double> longest_step;
  std::vector<double> held_ms;
  std::vector<double> ahead_steps;
  std::vector<double> ahead_ms;
  std::vector<double> total_ms;

  void add(const Run& run) {
    const std::vector<Step>& own = run.steps[0];
    const std::vector<Step>& peers = run.steps[1];
    std::vector<double> times;
    double most_steps = 0;
    double most_ms = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      times.push_back(milliseconds(own[i].ends - own[i].begins));
      const auto ended = std::ranges::count_if(
          peers, [&](const Step& peer) { return peer.ends <= own[i].ends; });
      most_steps = std::max(most_steps, static_cast<double>(i + 1) - ended);
      most_ms = std::max(most_ms, milliseconds(peers[i].ends - own[i].ends));
    }
    const double usual = quantile(times, 0.5);
    const auto longest = std::ranges::max_element(times);
    double held = 0;
    for (const double time : times) held += std::max(0.0, time - usual);
    longest_ms.push_back(*longest - usual);
    longest_step.push_back(static_cast<double>(longest - times.begin()));
    held_ms.push_back(held);
    ahead_steps.push_back(most_steps);
    ahead_ms.push_back(most_ms);
    total_ms.push_back(run.total_ms);
  }
};

void print(const Lateness& lateness, double device_ms, const Arm& arm,
           const Summary& of, const Summary& torchs) {
  std::vector<double> ratios;
  for (size_t i = 0; i < of.total_ms.size(); ++i) {
    ratios.push_back(of.total_ms[i] / torchs.total_ms[i]);
  }
  const auto median = [](const std::vector<double>& samples) {
    return quantile(samples, 0.5);
  };
  const Quartiles total = quartiles(of.total_ms);
  const Quartiles ratio = quartiles(ratios);
  fmt::print(
      "{:<7}{:>7}  {:<9}{:>8.1f} ({:>2.0f}){:>8.1f}{:>8.0f}{:>7.1f}"
      "{:>9.1f} {:<17}{:>6.3f} [{:.3f}, {:.3f}]\n",
      lateness.name, device_ms, arm.name, median(of.longest_ms),
      median(of.longest_step), median(of.held_ms), median(of.ahead_steps),
      median(of.ahead_ms), total.median,
      fmt::format("[{:.1f}, {:.1f}]", total.p25, total.p75), ratio.median,
      ratio.p25, ratio.p75);
  std::fflush(stdout);
}

void compare_arms(const Lateness& lateness, double device_ms,
                  const Options& options) {
  const std::vector<Arm> all = arms();
  std::vector<Summary> summaries(all.size());
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      const size_t turn = (i + round) % all.size();
      summaries[turn].add(measure(all[turn], lateness, device_ms, options));
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    print(lateness, device_ms, all[i], summaries[i], summaries.front());
  }
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("How far the host runs ahead where one is late.");
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber);
  app.add_option("--late-step", options.late_step)
      ->check(CLI::NonNegativeNumber);
  app.add_option("--late-ms", options.late_ms)->check(CLI::NonNegativeNumber);
  app.add_option("--late-every", options.late_every)
      ->check(CLI::Range(kRanks, 1000000));
  app.add_option("--host-ms", options.host_ms)->check(CLI::NonNegativeNumber);
  app.add_option("--device-ms", options.device_ms)
      ->delimiter(',')
      ->check(CLI::NonNegativeNumber);
  app.add_option("--rounds", options.rounds)->check(CLI::PositiveNumber);
  app.add_flag("--buffers", options.buffers);
  CLI11_PARSE(app, argc, argv);
  if (options.late_step >= options.steps) {
    fmt::print(stderr, "--late-step: expected less than --steps, {}, got {}\n",
               options.steps, options.late_step);
    return 1;
  }
  print_set_up(argc, argv);
  fmt::print("{:<7}{:>7}  {:<9}{:>13}{:>8}{:>15}{:>27}{:>23}\n", "late",
             "device", "", "longest step", "held", "ahead st., ms", "run ms",
             "/ torch");
  for (const Lateness& lateness : latenesses(options)) {
    for (const double device_ms : options.device_ms) {
      compare_arms(lateness, device_ms, options);
    }
  }
  return 0;
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) { return brigade::benchmarks::run(argc, argv); }
