// What exchanging statuses costs: the calling thread, until all have
// answered, and beside an all-reduce.
//
//   exchange_cost [--ranks 2] [--threads] [--exchanges 2000] [--numel 262144]
//
// Ranks are processes on this machine, or threads of one.  Times are rank 0's:
//   send     exchange(), which returns at once: what a backward pays
//   answer   from exchange() until await() returns, back to back
//   bucket   an all-reduce of `numel` floats and its wait
//   beside   what the same takes longer with an exchange sent before the wait
//            and awaited after it (paired differences)

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "brigade/benchmarks/support/local_launch.h"
#include "brigade/benchmarks/support/set_up.h"
#include "brigade/bucket_sweep/quantiles.h"
#include "brigade/comm/control/control_channel.h"
#include "brigade/comm/control/status_check.h"
#include "brigade/comm/process_group.h"

namespace brigade::benchmarks {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Samples = std::vector<double>;

struct Options {
  int ranks = 2;
  bool threads = false;
  int exchanges = 2000;
  int64_t numel = 1 << 18;
};

double microseconds(const std::function<void()>& fn) {
  const auto start = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now() - start)
      .count();
}

void require_equal(const std::vector<RankStatus>& by_rank) {
  const absl::Status status = check_statuses(by_rank);
  TORCH_CHECK(status.ok(), std::string(status.message()));
}

void print(const char* name, const Samples& samples) {
  const Quartiles times = quartiles(samples);
  fmt::print("{:8} {:9.2f} us  [{:.2f}, {:.2f}]\n", name, times.median,
             times.p25, times.p75);
}

void measure(const Group& group, const Options& options) {
  ControlChannel channel(group);
  Samples send, answer, bucket, beside;
  PendingExchange pending;
  const auto exchange = [&](int64_t iteration) {
    pending =
        channel.exchange({.kind = StatusKind::kEnd, .iteration = iteration});
  };
  const auto await = [&] { require_equal(channel.await(pending)); };

  for (int i = 0; i < options.exchanges; ++i) {
    double sent = 0;
    answer.push_back(microseconds([&] {
      sent = microseconds([&] { exchange(i); });
      await();
    }));
    send.push_back(sent);
  }

  std::vector<at::Tensor> tensors = {at::zeros(options.numel)};
  const auto all_reduce = [&] { return group->allreduce(tensors); };
  for (int i = 0; i < options.exchanges / 10; ++i) {
    const double alone = microseconds([&] { all_reduce()->wait(); });
    const double together = microseconds([&] {
      auto work = all_reduce();
      exchange(i);
      work->wait();
      await();
    });
    bucket.push_back(alone);
    beside.push_back(together - alone);
  }
  if (group->getRank() != 0) return;
  print("send", send);
  print("answer", answer);
  print("bucket", bucket);
  print("beside", beside);
}

void measure_threads(const Options& options) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < options.ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      GroupScope scope(make_process_group(store, rank, options.ranks,
                                          {.gloo_interfaces = {"lo"}}));
      measure(scope.group(), options);
    });
  }
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("What exchanging statuses costs.");
  app.add_option("--ranks", options.ranks)->check(CLI::Range(1, 64));
  app.add_flag("--threads", options.threads);
  app.add_option("--exchanges", options.exchanges)
      ->check(CLI::Range(10, 1000000));
  app.add_option("--numel", options.numel)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  if (!is_rank()) {
    print_set_up(argc, argv);
    std::fflush(stdout);
    if (!options.threads) return launch_local_ranks(options.ranks, argv);
    setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);  // one per process
    measure_threads(options);
    return 0;
  }
  end_with_launcher();
  GroupScope scope(init_process_group());
  measure(scope.group(), options);
  return 0;
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) { return brigade::benchmarks::run(argc, argv); }
