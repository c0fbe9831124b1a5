#include "brigade/comm/errors/peer_error.h"

#include <torch/torch.h>

#include <functional>
#include <latch>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/process_group.h"
#include "brigade/tests/support/counting_store.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/recording_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr std::chrono::milliseconds kLong = std::chrono::minutes(2);
constexpr std::chrono::milliseconds kShort{50};

TEST(LivenessProbeTest, CollectsAllAnswers) {
  run_ranks(3, [](Group group) {
    const LivenessProbe probe =
        probe_liveness(group, "k", 10 + group->getRank(), kLong);
    EXPECT_THAT(probe.answers, ElementsAre(10, 11, 12));
    EXPECT_EQ(probe.describe(), "all 3 ranks answered a liveness probe");
  });
}

TEST(LivenessProbeTest, NamesTheRankThatDoesNotAnswer) {
  run_ranks(3, [](Group group) {
    // Ranks 0 and 2 meet first, so that the second probe finds both within its
    // short timeout.
    if (group->getRank() == 1) {
      probe_liveness(group, "first", 0, kLong);
      return;
    }
    probe_liveness(group, "first", 0, kLong);
    // Timeout 0: only publishes.
    probe_liveness(group, "second", 7, std::chrono::milliseconds(0));
    group->getStore()->set("answered/" + std::to_string(group->getRank()), "");
    group->getStore()->wait({"answered/0", "answered/2"});
    const LivenessProbe probe = probe_liveness(group, "second", 7, kShort);
    EXPECT_THAT(probe.answers, ElementsAre(7, std::nullopt, 7));
    EXPECT_EQ(
        probe.describe(),
        "ranks 0, 2 answered a liveness probe, rank 1 did not within 0.1 s");
    EXPECT_EQ(probe.store_error, "");
  });
}

// Runs `probe` on a thread for each rank; `make_store` makes each rank's store.
void run_probes(
    int size,
    const std::function<c10::intrusive_ptr<c10d::Store>()>& make_store,
    const std::function<void(const Group&)>& probe) {
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      probe(c10::make_intrusive<c10d::ProcessGroup>(make_store(), rank, size));
    });
  }
}

TEST(LivenessProbeTest, ManyRanksUseOneKey) {
  constexpr int kRanks = 512;
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::latch answered(kRanks);
  run_probes(
      kRanks,
      [&] { return c10::make_intrusive<testing::CountingStore>(shared); },
      [&](const Group& group) {
        const int rank = group->getRank();
        probe_liveness(group, "k", rank, std::chrono::milliseconds(0));
        answered.arrive_and_wait();
        const LivenessProbe probe = probe_liveness(group, "k", rank, kLong);
        for (int peer = 0; peer < kRanks; ++peer) {
          EXPECT_EQ(probe.answers[peer], peer);
        }
        const auto& store =
            dynamic_cast<testing::CountingStore&>(*group->getStore());
        EXPECT_EQ(store.num_keys(), 1);
        EXPECT_EQ(store.num_requests(), 3);  // two appends and a get
      });
}

// For example a FileStore, or a user's store.
class StoreWithoutAppend : public testing::CountingStore {
 public:
  using CountingStore::CountingStore;
  void append(const std::string&, const std::vector<uint8_t>&) override {
    throw std::logic_error("append() is not supported");
  }
  bool hasExtendedApi() const override { return false; }
};

TEST(LivenessProbeTest, AStoreWithoutAppendHasAKeyPerRank) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  run_probes(
      5, [&] { return c10::make_intrusive<StoreWithoutAppend>(shared); },
      [](const Group& group) {
        const LivenessProbe probe =
            probe_liveness(group, "k", 10 + group->getRank(), kLong);
        EXPECT_THAT(probe.answers, ElementsAre(10, 11, 12, 13, 14));
      });
}

class BrokenStore : public c10d::HashStore {
 public:
  void append(const std::string&, const std::vector<uint8_t>&) override {
    throw std::runtime_error("Broken pipe");
  }
};

TEST(LivenessProbeTest, ReportsAFailedStore) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(
      c10::make_intrusive<BrokenStore>(), 0, 2);
  const LivenessProbe probe = probe_liveness(group, "k", 1, kLong);
  EXPECT_THAT(probe.answers, ElementsAre(1, std::nullopt));
  EXPECT_EQ(probe.store_error, "Broken pipe");
  EXPECT_THAT(probe.describe(),
              HasSubstr("(the group's store failed: Broken pipe)"));
}

// Hangs until it is released, like the client of a stopped server.
class HangingStore : public c10d::HashStore {
 public:
  void append(const std::string&, const std::vector<uint8_t>&) override {
    released.wait(false);
  }
  std::atomic<bool> released = false;
};

TEST(LivenessProbeTest, ReturnsEvenIfTheStoreHangs) {
  auto store = c10::make_intrusive<HangingStore>();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, 0, 2);
  const LivenessProbe probe = probe_liveness(group, "k", 1, kShort);
  EXPECT_THAT(probe.store_error, HasSubstr("no reply from the store within"));
  store->released = true;
  store->released.notify_all();
}

TEST(LivenessProbeTest, ReportsAMissingStore) {
  RecordingGroup recording(2, 1);
  const LivenessProbe probe = probe_liveness(recording.group(), "k", 5, kLong);
  EXPECT_THAT(probe.answers, ElementsAre(std::nullopt, 5));
  EXPECT_EQ(probe.store_error, "the group has no store");
}

TEST(LivenessProbeTest, AWorldOfOneIsComplete) {
  const LivenessProbe probe =
      probe_liveness(single_process_group(), "k", 5, kLong);
  EXPECT_THAT(probe.answers, ElementsAre(5));
  EXPECT_EQ(probe.describe(), "the only rank answered a liveness probe");
}

TEST(DescribeRanksTest, ListsAndRanges) {
  using Ranks = std::vector<int>;
  EXPECT_EQ(describe_ranks(Ranks{}), "no rank");
  EXPECT_EQ(describe_ranks(Ranks{4}), "rank 4");
  EXPECT_EQ(describe_ranks(Ranks{0, 1}), "ranks 0, 1");
  EXPECT_EQ(describe_ranks(Ranks{0, 2, 5, 6, 7, 9}), "ranks 0, 2, 5-7, 9");
}

// Returns the text of the thrown error if its type is E.
template <typename E>
std::string thrown_for(std::exception_ptr error,
                       const LivenessProbe* probe = nullptr) {
  try {
    throw_peer_error("bucket 3", error, probe);
  } catch (const E& e) {
    return typeid(e) == typeid(E) ? e.what_without_backtrace() : "other type";
  } catch (...) {
    return "other type";
  }
}

TEST(PeerErrorTest, PrependsTheContext) {
  EXPECT_EQ(thrown_for<PeerError>(std::make_exception_ptr(
                std::runtime_error("Connection closed by peer.\n"))),
            "bucket 3: Connection closed by peer.");
  EXPECT_EQ(thrown_for<PeerError>(
                std::make_exception_ptr(c10::DistBackendError("NCCL error"))),
            "bucket 3: NCCL error.");
  EXPECT_EQ(thrown_for<PeerError>(std::make_exception_ptr(5)),
            "bucket 3: an unknown exception.");
}

TEST(PeerErrorTest, KeepsTheEllipsisOfACutText) {
  EXPECT_EQ(thrown_for<PeerError>(std::make_exception_ptr(
                std::runtime_error("the gradient of para..."))),
            "bucket 3: the gradient of para...");
}

TEST(PeerErrorTest, AddsTheLivenessProbe) {
  const LivenessProbe probe = {.answers = {1, std::nullopt},
                               .timeout = std::chrono::seconds(2)};
  EXPECT_EQ(thrown_for<PeerError>(
                std::make_exception_ptr(std::runtime_error("reset")), &probe),
            "bucket 3: reset. rank 0 answered a liveness probe, rank 1 did not "
            "within 2.0 s.");
}

TEST(PeerErrorTest, PassesPeerErrorsAndLocalErrorsUnchanged) {
  const auto first = [] {
    try {
      throw_peer_error("first",
                       std::make_exception_ptr(std::runtime_error("reset")));
    } catch (...) {
      return std::current_exception();
    }
  }();
  EXPECT_EQ(thrown_for<PeerError>(first), "first: reset.");
  EXPECT_EQ(thrown_for<c10::ValueError>(
                std::make_exception_ptr(c10::ValueError("bad argument"))),
            "bad argument");
  EXPECT_EQ(thrown_for<c10::OutOfMemoryError>(
                std::make_exception_ptr(c10::OutOfMemoryError("full"))),
            "full");
}

}  // namespace
}  // namespace brigade
