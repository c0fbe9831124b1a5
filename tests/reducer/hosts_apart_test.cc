// Ranks whose hosts wait for nothing in a collective, as on devices, so that
// one may be many iterations ahead of another when a rank fails.

#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/backends/identical_ranks_backend.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/step.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace hosts_apart_test {

using testing::step;
using testing::throw_in_backward;
using testing::ToyModel;
using testing::UserError;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Log = std::vector<std::string>;

struct ForwardError : UserError {
  using UserError::UserError;
};

const ToyModel::Sizes kSizes = {{2}, {3}, {5}};
constexpr int kRanks = 3;
constexpr int kSource = 1;  // of buffers

// Notes what this rank launches, and answers at once.
class LoggingBackend final : public IdenticalRanksBackend {
 public:
  LoggingBackend(int rank, int world_size, Log& log)
      : IdenticalRanksBackend(rank, world_size), log_(log) {}

  uint64_t getSequenceNumberForGroup() override { return log_.size(); }

 protected:
  c10::intrusive_ptr<c10d::Work> launch(
      CollectiveCall collective, std::function<void()> compute) override {
    std::string line = c10d::opTypeToString(collective.type);
    for (const at::Tensor& input : collective.inputs) {
      absl::StrAppend(&line, " ", input.numel());
    }
    log_.push_back(std::move(line));
    return IdenticalRanksBackend::launch(std::move(collective),
                                         std::move(compute));
  }

 private:
  Log& log_;
};

// With the store of `group`, by which ranks tell each other where they are.
Group make_logging_group(const Group& group, Log& log) {
  using c10d::ProcessGroup;
  auto logging = c10::make_intrusive<ProcessGroup>(
      group->getStore(), group->getRank(), group->getSize());
  logging->setBackend(at::kCPU, ProcessGroup::BackendType::CUSTOM,
                      c10::make_intrusive<LoggingBackend>(
                          group->getRank(), group->getSize(), log));
  logging->setDefaultBackend(ProcessGroup::BackendType::CUSTOM);
  logging->setGroupName("logging");
  return logging;
}

class HostsApartTest
    : public ::testing::TestWithParam<std::tuple<const char*, int>> {
 protected:
  ReducerOptions options() const {
    const std::string_view mode = std::get<const char*>(GetParam());
    return {.bucket_plan = {{2}, {1}, {0}},
            .find_unused_parameters = mode == "find_unused",
            .static_graph = mode == "static_graph",
            .rebuild_buckets = mode == "rebuilding",
            .gradients_as_bucket_views = mode != "copies",
            .lazy_bucket_allocation = mode == "lazy",
            .verify_across_ranks = mode != "opened_unverified",
            .defer_status_check = true,
            .max_unconfirmed_iterations = std::get<int>(GetParam())};
  }

  static bool opens() {
    return std::string_view(std::get<const char*>(GetParam()))
        .starts_with("opened");
  }

  // As forward begins: buffers are sent ahead of most iterations, not always
  // the same ones, by way of a sync point in some, and on one rank in some. Not
  // in those where they change (17, 38, ...): it could not send them for peers.
  static void send_buffers(Reducer& reducer, c10d::ProcessGroup& group) {
    if (!opens()) return;
    const int64_t iteration = reducer.statistics().begun + 1;
    const int64_t way = iteration % 7;
    if (way == 0) return;
    std::vector<at::Tensor> buffers = {
        at::ones({20 + (iteration + 4) / 21 % 3})};
    if (way == 1 || (way == 2 && group.getRank() == 0 && iteration % 10 != 0)) {
      reducer.recover();
      group.broadcast(buffers, {.rootRank = kSource});
    } else {
      reducer.open_iteration(std::move(buffers), kSource);
    }
  }

  // Without a backward, and looking for its peers behind it or not.
  static void fail_in_forward(Reducer& reducer, const ToyModel& model,
                              bool is_prepared) {
    if (is_prepared) {
      reducer.prepare_for_backward(model.loss(0));
      reducer.recover();
    }
    throw ForwardError("no memory");
  }
};
INSTANTIATE_TEST_SUITE_P(
    Modes, HostsApartTest,
    ::testing::Combine(::testing::Values("plain", "copies", "find_unused",
                                         "static_graph", "rebuilding", "lazy",
                                         "opened", "opened_unverified"),
                       ::testing::Values(1, 4, 32)),
    [](const auto& info) {
      return absl::StrCat(std::get<const char*>(info.param), "_",
                          std::get<int>(info.param));
    });

// Each failure is raised once on each rank. What ranks have launched in the end
// is the same, whoever was ahead of whom when one failed.
TEST_P(HostsApartTest, RanksThatFailAnywhereLaunchTheSame) {
  constexpr int kNumFailures = 40;
  constexpr int kNumLastSteps = 5;
  std::vector<Log> logs(kRanks);
  testing::run_ranks(kRanks, [&](const Group& group) {
    const int rank = group->getRank();
    const ToyModel model(kSizes);
    const Group logging = make_logging_group(group, logs[rank]);
    Reducer reducer(model.parameters, logging, options());
    const size_t num_compared = logs[rank].size();  // by construction
    std::mt19937 random(11 + rank);
    const auto draw = [&](int from, int to) {
      return std::uniform_int_distribution<int>(from, to)(random);
    };
    int failures = 0;
    while (failures < kNumFailures) {
      // Ranks fail seldom enough for others to get ahead.
      const bool fails = draw(0, 4 * kRanks) == 0;
      for (int i = draw(0, 1) * draw(0, 200); i > 0; --i)
        std::this_thread::yield();
      try {
        model.zero_grad();
        send_buffers(reducer, *logging);
        if (fails && opens() && draw(0, 2) == 0) {
          fail_in_forward(reducer, model, /*is_prepared=*/draw(0, 1) == 0);
        } else if (fails) {
          throw_in_backward(reducer, model, rank, draw(-1, 3));
        } else {
          step(reducer, model.loss(rank));
        }
      } catch (const ForwardError&) {
        // Its peers hear nothing of it until it comes to the next step.
      } catch (const UserError&) {
        ++failures;
      } catch (const c10::Error&) {
        ++failures;
      }
      ASSERT_TRUE(reducer.can_continue()) << "after " << failures;
    }
    for (int i = 0; i < kNumLastSteps; ++i) {
      send_buffers(reducer, *logging);
      step(reducer, model.loss(rank));
    }
    reducer.recover();
    logs[rank].erase(logs[rank].begin(), logs[rank].begin() + num_compared);
  });
  for (int rank = 1; rank < kRanks; ++rank) EXPECT_EQ(logs[0], logs[rank]);
  EXPECT_GE(logs[0].size(), kNumLastSteps * kSizes.size());
}

}  // namespace hosts_apart_test
}  // namespace brigade
