// What the exchange of statuses costs a rank of many.
//
//   exchange_scaling [--ranks 2,4,8,...,512] [--exchanges 200]
//
// Ranks are threads of this process; connections, messages and keys are those
// of ranks on different machines.  One line for each number of ranks, the most
// that any of them has:
//   connections  to other ranks, in place of one to each
//   keys         of the store, read or written to connect
//   equal        messages sent in an exchange in which all agree
//   different    in one in which each says something else, which all learn
//   connect      time until the ranks have met
//   exchange, gather   time from exchange() to the end of await(), of rank 0;
//                threads share this machine's cores, which many machines don't

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <barrier>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "brigade/benchmarks/support/set_up.h"
#include "brigade/bucket_sweep/quantiles.h"
#include "brigade/comm/control/control_channel.h"
#include "brigade/comm/control/status_mesh.h"
#include "brigade/tests/support/counting_store.h"

namespace brigade::benchmarks {
namespace {

using testing::CountingStore;

using Clock = std::chrono::steady_clock;

struct Options {
  std::vector<int> ranks = {2, 3, 4, 8, 16, 32, 64, 128, 256, 512};
  int exchanges = 200;
};

struct Cost {
  int64_t connections = 0;
  int64_t keys = 0;
  int64_t equal = 0;
  int64_t different = 0;
  double connect_ms = 0;
  std::vector<double> exchange_us;  // rank 0's
  std::vector<double> gather_us;
};

double microseconds(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

Cost measure(int size, const Options& options) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::barrier all(size);
  std::mutex mutex;
  Cost cost;
  const auto measure_rank = [&](int rank) {
    const auto store = c10::make_intrusive<CountingStore>(shared);
    const auto group =
        c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
    all.arrive_and_wait();
    const Clock::time_point start = Clock::now();
    ControlChannel channel(group);
    const double connect_us = microseconds(Clock::now() - start);
    const auto mesh = StatusMesh::of(group);
    const auto exchange = [&](bool differs, std::vector<double>& times) {
      all.arrive_and_wait();
      const int64_t before = mesh->traffic().messages_sent;
      all.arrive_and_wait();
      const Clock::time_point sent = Clock::now();
      const auto difference = channel.await_difference(channel.exchange(
          {.kind = StatusKind::kEnd, .iteration = differs ? rank : 7}));
      if (rank == 0) times.push_back(microseconds(Clock::now() - sent));
      TORCH_CHECK(difference.has_value() == differs, "expected ranks to ",
                  differs ? "differ" : "agree", ", they did not");
      return mesh->traffic().messages_sent - before;
    };
    int64_t equal = 0;
    int64_t different = 0;
    for (int i = 0; i < options.exchanges; ++i) {
      equal = std::max(equal, exchange(false, cost.exchange_us));
      different = std::max(different, exchange(true, cost.gather_us));
    }
    all.arrive_and_wait();
    const std::lock_guard<std::mutex> lock(mutex);
    cost.connections =
        std::max<int64_t>(cost.connections, mesh->traffic().connections);
    cost.keys = std::max(cost.keys, store->num_keys());
    cost.equal = std::max(cost.equal, equal);
    cost.different = std::max(cost.different, different);
    cost.connect_ms = std::max(cost.connect_ms, connect_us / 1000);
  };
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] { measure_rank(rank); });
    }
  }
  return cost;
}

std::string spread(const std::vector<double>& times) {
  const Quartiles of = quartiles(times);
  return fmt::format("{:.0f} [{:.0f}, {:.0f}]", of.median, of.p25, of.p75);
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("What the exchange of statuses costs a rank of many.");
  app.add_option("--ranks", options.ranks)
      ->delimiter(',')
      ->check(CLI::Range(2, 1024));
  app.add_option("--exchanges", options.exchanges)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  print_set_up(argc, argv);
  fmt::print("{:>6}{:>13}{:>6}{:>7}{:>11}{:>12}{:>24}{:>24}\n", "ranks",
             "connections", "keys", "equal", "different", "connect ms",
             "exchange us", "gather us");
  for (const int size : options.ranks) {
    const Cost cost = measure(size, options);
    fmt::print("{:>6}{:>13}{:>6}{:>7}{:>11}{:>12.1f}{:>24}{:>24}\n", size,
               cost.connections, cost.keys, cost.equal, cost.different,
               cost.connect_ms, spread(cost.exchange_us),
               spread(cost.gather_us));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace brigade::benchmarks

int main(int argc, char** argv) { return brigade::benchmarks::run(argc, argv); }
