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
#include <unordered_set>
#include <vector>

#include "brigade/benchmarks/support/set_up.h"
#include "brigade/bucket_sweep/quantiles.h"
#include "brigade/comm/control_channel.h"
#include "brigade/comm/status_mesh.h"

namespace brigade::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::vector<int> ranks = {2, 3, 4, 8, 16, 32, 64, 128, 256, 512};
  int exchanges = 200;
};

// Counts the keys that one rank reads and writes.
class CountingStore : public c10d::Store {
 public:
  explicit CountingStore(c10::intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)) {}

  int64_t num_keys() const { return static_cast<int64_t>(keys_.size()); }

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    keys_.insert(key);
    store_->set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    keys_.insert(key);
    return store_->get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    keys_.insert(key);
    return store_->add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    keys_.insert(keys.begin(), keys.end());
    return store_->check(keys);
  }
  void wait(const std::vector<std::string>& keys) override {
    keys_.insert(keys.begin(), keys.end());
    store_->wait(keys);
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    keys_.insert(keys.begin(), keys.end());
    store_->wait(keys, timeout);
  }
  bool deleteKey(const std::string& key) override {
    return store_->deleteKey(key);
  }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this);
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  std::unordered_set<std::string> keys_;
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
  for (const auto& [name, value] : describe_set_up(argc, argv)) {
    fmt::print("{}: {}\n", name, value);
  }
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
