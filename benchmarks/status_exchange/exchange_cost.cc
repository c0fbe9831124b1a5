// What exchanging statuses costs: the calling thread, until all have answered,
// and beside an all-reduce.
//
//   exchange_cost [--ranks 2,4] [--threads] [--exchanges 2000]
//                 [--numel 262144]
//
// One table for each number of ranks, which are processes on this machine, or
// threads of one. Its rows are the two transports: "memory" that the ranks of
// one host share, and "group": all-gathers on a subgroup, as between hosts.
// Times are rank 0's, medians and quartiles in microseconds:
//   send     send(), which returns at once: what a backward pays
//   answer   from send() until all statuses are there, back to back
//   bucket   an all-reduce of `numel` floats and its wait
//   beside   what the same takes longer with a status sent before the wait and
//            awaited after it (paired differences)

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "brigade/benchmarks/support/local_launch.h"
#include "brigade/benchmarks/support/set_up.h"
#include "brigade/bucket_sweep/quantiles.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/status/rank_status.h"
#include "brigade/comm/status/status_board.h"
#include "brigade/comm/status/status_gather.h"
#include "brigade/comm/status/status_transport.h"

namespace brigade::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Samples = std::vector<double>;

struct Options {
  std::vector<int> ranks = {2, 4};
  bool threads = false;
  int exchanges = 2000;
  int64_t numel = 1 << 18;
};

double microseconds(const std::function<void()>& fn) {
  const Clock::time_point start = Clock::now();
  fn();
  return std::chrono::duration<double, std::micro>(Clock::now() - start)
      .count();
}

std::string spread(const Samples& samples) {
  const Quartiles times = quartiles(samples);
  return fmt::format("{:.1f} [{:.1f}, {:.1f}]", times.median, times.p25,
                     times.p75);
}

void measure(const char* name, const Group& group, StatusTransport& transport,
             const Options& options) {
  RankStatus own = {.kind = StatusKind::kEnd};
  const auto send = [&] {
    ++own.sequence;
    own.iteration = own.sequence;
    transport.send(own);
  };
  const auto await = [&] {
    const auto by_rank =
        transport.receive(own.sequence, Clock::now() + std::chrono::minutes(1));
    TORCH_CHECK(by_rank.has_value(), "no answer within a minute");
    const absl::Status status = check_statuses(*by_rank);
    TORCH_CHECK(status.ok(), std::string(status.message()));
  };

  Samples sent, answer, bucket, beside;
  for (int i = 0; i < options.exchanges; ++i) {
    double time = 0;
    answer.push_back(microseconds([&] {
      time = microseconds(send);
      await();
    }));
    sent.push_back(time);
  }

  std::vector<at::Tensor> tensors = {at::zeros(options.numel)};
  const auto all_reduce = [&] { return group->allreduce(tensors); };
  for (int i = 0; i < options.exchanges / 10; ++i) {
    const double alone = microseconds([&] { all_reduce()->wait(); });
    const double together = microseconds([&] {
      auto work = all_reduce();
      send();
      work->wait();
      await();
    });
    bucket.push_back(alone);
    beside.push_back(together - alone);
  }
  if (group->getRank() != 0) return;
  fmt::print("{:>6}  {:<7}{:>22}{:>28}{:>30}{:>28}\n", group->getSize(), name,
             spread(sent), spread(answer), spread(bucket), spread(beside));
  std::fflush(stdout);
}

void measure_both(const Group& group, const Options& options) {
  if (const auto board = meet_at_status_board(group)) {
    measure("memory", group, *board, options);
  }
  const auto gather = gather_statuses_over(group);
  measure("group", group, *gather, options);
  group->barrier()->wait();  // one that leaves ends what its peers wait for
}

void measure_threads(int size, const Options& options) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      GroupScope scope(
          make_process_group(store, rank, size, {.gloo_interfaces = {"lo"}}));
      measure_both(scope.group(), options);
    });
  }
}

int launch(int argc, char** argv, const Options& options) {
  print_set_up(argc, argv);
  fmt::print("{:>6}  {:<7}{:>22}{:>28}{:>30}{:>28}\n", "ranks", "over",
             "send us", "answer us", "bucket us", "beside us");
  std::fflush(stdout);
  if (options.threads) {
    setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);  // one per process
  }
  for (const int size : options.ranks) {
    if (options.threads) {
      measure_threads(size, options);
    } else if (const int code = launch_local_ranks(size, argv); code != 0) {
      return code;
    }
  }
  return 0;
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("What exchanging statuses costs.");
  app.add_option("--ranks", options.ranks)
      ->delimiter(',')
      ->check(CLI::Range(2, 64));
  app.add_flag("--threads", options.threads);
  app.add_option("--exchanges", options.exchanges)
      ->check(CLI::Range(10, 1000000));
  app.add_option("--numel", options.numel)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  if (!is_rank()) return launch(argc, argv, options);
  end_with_launcher();
  GroupScope scope(init_process_group());
  measure_both(scope.group(), options);
  return 0;
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) { return brigade::benchmarks::run(argc, argv); }
