// The ordered all-reduce beside the group's own: what the bits cost.
//
//   ordered_all_reduce [--ranks 2] [--sizes 1024,...,67108864] [--rounds 40]
//                      [--at-once 1] [--shared-bytes 268435456]
//
// Ranks are processes on this machine, over loopback; or, with a launcher's
// environment variables, those that it starts, on one host or several.  Each
// round times one all-reduce of float32 of either kind, until it is done, with
// a barrier before, in an order that changes from round to round; with
// --at-once N, N in flight. Times are rank 0's: medians and quartiles.
//   group     the group's all-reduce
//   ordered   OrderedCollectives::all_reduce()
//   ratio     ordered / group, of each round
//   launch    what the calls of the ordered ones take of the caller's time
//   cpu       processor time of the rank's threads, ordered / group
// Sums are compared with those of one process; a wrong one ends the program.

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "brigade/benchmarks/support/local_launch.h"
#include "brigade/benchmarks/support/set_up.h"
#include "brigade/bucket_sweep/quantiles.h"
#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm/process_group.h"

namespace brigade::benchmarks {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Clock = std::chrono::steady_clock;

struct Options {
  int ranks = 2;
  std::vector<int64_t> sizes = {1 << 10, 1 << 14, 1 << 16, 1 << 18,
                                1 << 20, 1 << 22, 1 << 24, 1 << 26};
  int rounds = 40;
  int at_once = 1;
  int64_t shared_bytes = OrderedOptions().shared_bytes;
};

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start)
      .count();
}

// Of all threads of this process.
double processor_microseconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return 1e6 * static_cast<double>(time.tv_sec) +
         1e-3 * static_cast<double>(time.tv_nsec);
}

struct Times {
  double wall_us;
  double processor_us;
};

at::Tensor values_of(int rank, int64_t numel) {
  return at::arange(numel, at::kFloat).fmod(1000).mul(0.1).add(rank);
}

class Measurement {
 public:
  Measurement(const Group& group, OrderedCollectives& collectives,
              int64_t numel, int at_once)
      : group_(group), collectives_(collectives) {
    for (int i = 0; i < at_once; ++i) {
      tensors_.push_back({values_of(group->getRank(), numel)});
    }
    expected_ = values_of(0, numel);
    for (int rank = 1; rank < group->getSize(); ++rank) {
      expected_.add_(values_of(rank, numel));
    }
  }

  Times time_group() {
    const auto start = begin();
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (auto& tensor : tensors_) works.push_back(group_->allreduce(tensor));
    for (const auto& work : works) work->wait();
    return since(start);
  }

  Times time_ordered() {
    const auto start = begin();
    std::vector<OrderedCollectives::FuturePtr> futures;
    for (const auto& tensor : tensors_) {
      futures.push_back(collectives_.all_reduce(tensor[0]));
    }
    launch_us.push_back(since(start).wall_us);
    for (const auto& future : futures) future->waitAndThrow();
    const Times times = since(start);
    for (const auto& tensor : tensors_) {
      TORCH_CHECK(at::equal(tensor[0], expected_), "expected the sum of ",
                  group_->getSize(), " ranks, found another");
    }
    return times;
  }

  std::vector<double> launch_us;

 private:
  struct Start {
    Clock::time_point time;
    double processor_us;
  };

  static Times since(const Start& start) {
    return {.wall_us = microseconds_since(start.time),
            .processor_us = processor_microseconds() - start.processor_us};
  }

  Start begin() {
    for (auto& tensor : tensors_) {
      tensor[0].copy_(values_of(group_->getRank(), tensor[0].numel()));
    }
    group_->barrier()->wait();
    return {.time = Clock::now(), .processor_us = processor_microseconds()};
  }

  const Group group_;
  OrderedCollectives& collectives_;
  std::vector<std::vector<at::Tensor>> tensors_;
  at::Tensor expected_;
};

std::string spread(const std::vector<double>& values, const char* format) {
  const Quartiles of = quartiles(values);
  return fmt::format(fmt::runtime(format), of.median, of.p25, of.p75);
}

void measure(const Group& group, const Options& options) {
  constexpr const char* kTime = "{:.0f} [{:.0f}, {:.0f}]";
  constexpr const char* kRatio = "{:.2f} [{:.2f}, {:.2f}]";
  OrderedCollectives collectives(group, {.shared_bytes = options.shared_bytes});
  if (group->getRank() == 0) {
    fmt::print("{:>10}{:>24}{:>24}{:>20}{:>24}{:>20}\n", "bytes", "group us",
               "ordered us", "ratio", "launch us", "cpu");
  }
  for (const int64_t bytes : options.sizes) {
    Measurement measurement(group, collectives, bytes / 4, options.at_once);
    measurement.time_group();  // first ones make memory, and are not counted
    measurement.time_ordered();
    measurement.launch_us.clear();
    std::vector<double> group_us, ordered_us, ratio, processor_ratio;
    for (int round = 0; round < options.rounds; ++round) {
      Times plain = {};
      if (round % 2 == 0) plain = measurement.time_group();
      const Times ordered = measurement.time_ordered();
      if (round % 2 != 0) plain = measurement.time_group();
      group_us.push_back(plain.wall_us);
      ordered_us.push_back(ordered.wall_us);
      ratio.push_back(ordered.wall_us / plain.wall_us);
      processor_ratio.push_back(ordered.processor_us / plain.processor_us);
    }
    if (group->getRank() != 0) continue;
    fmt::print("{:>10}{:>24}{:>24}{:>20}{:>24}{:>20}\n", bytes,
               spread(group_us, kTime), spread(ordered_us, kTime),
               spread(ratio, kRatio), spread(measurement.launch_us, kTime),
               spread(processor_ratio, kRatio));
    std::fflush(stdout);
  }
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("The ordered all-reduce beside the group's own.");
  app.add_option("--ranks", options.ranks)->check(CLI::Range(2, 64));
  app.add_option("--sizes", options.sizes, "bytes, multiples of 4")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{4}, int64_t{1} << 32));
  app.add_option("--rounds", options.rounds)->check(CLI::Range(2, 100000));
  app.add_option("--at-once", options.at_once)->check(CLI::Range(1, 1000));
  app.add_option(
         "--shared-bytes", options.shared_bytes,
         "memory that ranks of one host share; 0: the group's collectives")
      ->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  if (!is_rank()) {
    for (const auto& [name, value] : describe_set_up(argc, argv)) {
      fmt::print("{}: {}\n", name, value);
    }
    std::fflush(stdout);
    return launch_local_ranks(options.ranks, argv);
  }
  end_with_launcher();
  GroupScope scope(init_process_group());
  measure(scope.group(), options);
  return 0;
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) { return brigade::benchmarks::run(argc, argv); }
