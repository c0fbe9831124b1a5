#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/observing/stall_watch.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Optional;
using testing::run_ranks;
using testing::step;
using testing::ToyModel;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const StallWatch::Names kNames = {
    .engine = "Reducer", .unit = "bucket", .without_data = "join()"};

// ---- StallWatch::Check: ranks of one store, with a clock of the test

class StallCheckTest : public ::testing::Test {
 protected:
  struct Rank {
    std::shared_ptr<Progress> progress = std::make_shared<Progress>();
    std::string words = "does something";
    std::unique_ptr<StallWatch::Check> check;
  };

  static constexpr int kWorldSize = 3;

  StallCheckTest() {
    for (int r = 0; r < kWorldSize; ++r) {
      auto rank = std::make_unique<Rank>();
      rank->progress->num_units = 5;
      rank->check = std::make_unique<StallWatch::Check>(
          StallWatch::Check::Channel{.store = store_,
                                     .prefix = "progress/",
                                     .rank = r,
                                     .world_size = kWorldSize},
          kNames, rank->progress, [words = &rank->words] { return *words; });
      ranks_.push_back(std::move(rank));
    }
  }

  void set_place(int rank, int64_t iteration, int64_t launched) {
    ranks_[rank]->progress->iteration = iteration;
    ranks_[rank]->progress->launched = launched;
  }

  void begin_to_wait(int rank) {
    ++ranks_[rank]->progress->num_waits;
    ranks_[rank]->progress->num_waiting = 1;
  }

  void end_to_wait(int rank) { ranks_[rank]->progress->num_waiting = 0; }

  std::optional<std::string> check(int rank, int time_ms) {
    return ranks_[rank]->check->look(
        StallWatch::Check::Time(milliseconds{time_ms}), milliseconds{1000});
  }

  // Returns rank 0's report after 1 s of checks, in which `others` check, too.
  std::optional<std::string> stall_of_rank_0(const std::vector<int>& others,
                                             int begin_ms = 0) {
    std::optional<std::string> warning;
    for (int time_ms = begin_ms; time_ms <= begin_ms + 1000; time_ms += 250) {
      EXPECT_EQ(warning, std::nullopt);
      for (const int rank : others) check(rank, time_ms);
      warning = check(0, time_ms);
    }
    EXPECT_EQ(check(0, begin_ms + 1250), std::nullopt);  // reports once
    return warning;
  }

  c10::intrusive_ptr<c10d::HashStore> store_ =
      c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Rank>> ranks_;
};

// Rank 1 is late; the others wait.
TEST_F(StallCheckTest, NamesTheLateRankAndItsProgress) {
  struct Case {
    std::string name;
    int64_t iteration;  // of rank 1; that of the others is 17
    int64_t launched;   // by rank 1
    int64_t launched_by_others;
    bool late_rank_waits;
  };
  int begin_ms = 0;
  for (const auto& [name, iteration, launched, by_others, late_rank_waits] :
       {Case{"launched less", 17, 3, 5, false},
        Case{"in the iteration before", 16, 5, 0, false},
        Case{"busy", 17, 0, 0, false},
        Case{"waits in another iteration", 18, 5, 5, true}}) {
    SCOPED_TRACE(name);
    set_place(0, 17, by_others);
    set_place(2, 17, by_others);
    set_place(1, iteration, launched);
    ranks_[1]->words = name;
    for (const int rank : {0, 2}) begin_to_wait(rank);
    if (late_rank_waits) begin_to_wait(1);
    EXPECT_THAT(
        stall_of_rank_0({1, 2}, begin_ms),
        Optional(AllOf(
            HasSubstr("rank 0 has waited 1.0 s for its peers "
                      "in iteration 17 ("),
            HasSubstr(" of 5 buckets launched)"),
            HasSubstr("Late: rank 1 " + name + " (no progress for 1.0 s).\n"),
            HasSubstr("use join()"), Not(HasSubstr("rank 2")))));
    for (int rank = 0; rank < kWorldSize; ++rank) end_to_wait(rank);
    for (int rank = 0; rank < kWorldSize; ++rank) check(rank, begin_ms + 1500);
    begin_ms += 2000;
  }
}

TEST_F(StallCheckTest, SaysHowLongALateRankHasNotChanged) {
  set_place(0, 1, 5);
  begin_to_wait(0);
  check(2, 0);
  for (const int time_ms : {0, 250, 500, 750}) {
    check(0, time_ms);
    ranks_[2]->words = time_ms < 750 ? "works" : "works on";
    check(2, time_ms);
  }
  check(2, 950);
  EXPECT_THAT(check(0, 1000),
              Optional(HasSubstr("rank 2 works on (no progress for 0.2 s)")));
}

TEST_F(StallCheckTest, NamesRanksThatDoNotAnswer) {
  set_place(0, 2, 1);
  set_place(1, 2, 1);
  begin_to_wait(0);
  EXPECT_THAT(stall_of_rank_0({1}),
              Optional(HasSubstr("No answer from rank 2")));
  // An answer to an earlier question does not count.
  check(2, 1500);
  check(2, 1750);
  begin_to_wait(0);
  EXPECT_THAT(stall_of_rank_0({1}, 2000),
              Optional(HasSubstr("No answer from rank 2")));
}

TEST_F(StallCheckTest, NamesTheUnitThatIsAwaited) {
  const std::string unit = "blocks.1", outermost;
  set_place(0, iteration_of(SegmentKind::kForward, 6), 1);
  int begin_ms = 0;
  for (const auto& [awaited, text] :
       {std::pair{&unit, "for unit 'blocks.1', in the forward of step 6"},
        std::pair{&outermost, "for the outermost unit, in"}}) {
    const WaitForPeers waiting(*ranks_[0]->progress, awaited);
    EXPECT_THAT(stall_of_rank_0({}, begin_ms), Optional(HasSubstr(text)));
    begin_ms += 2000;
  }
}

TEST_F(StallCheckTest, ReportsEqualProgressOfAllRanks) {
  for (int rank = 0; rank < kWorldSize; ++rank) {
    set_place(rank, 2, 5);
    begin_to_wait(rank);
  }
  for (const int time_ms : {0, 250, 500, 750}) {
    for (int rank = 0; rank < kWorldSize; ++rank) check(rank, time_ms);
  }
  EXPECT_THAT(check(0, 1000),
              Optional(HasSubstr("All ranks have made the same progress")));
}

TEST_F(StallCheckTest, ReportsEachStallAnew) {
  set_place(0, 2, 5);
  begin_to_wait(0);
  EXPECT_TRUE(stall_of_rank_0({1, 2}));
  end_to_wait(0);
  EXPECT_EQ(check(0, 1500), std::nullopt);
  begin_to_wait(0);
  EXPECT_TRUE(stall_of_rank_0({1, 2}, 2000));
}

TEST_F(StallCheckTest, WritesNothingWithoutLongWaits) {
  const int64_t num_keys = store_->getNumKeys();
  for (int time_ms = 0; time_ms < 10'000; time_ms += 250) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      if (time_ms % 500 == 0) begin_to_wait(rank);
      EXPECT_EQ(check(rank, time_ms), std::nullopt);
    }
  }
  // Without waits.
  for (int rank = 0; rank < kWorldSize; ++rank) end_to_wait(rank);
  for (int time_ms = 10'000; time_ms < 20'000; time_ms += 250) {
    EXPECT_EQ(check(0, time_ms), std::nullopt);
  }
  EXPECT_EQ(store_->getNumKeys(), num_keys);
}

// ---- The thread

// Store whose check() blocks until open().
class ClosedStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_looks_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    return HashStore::check(keys);
  }
  void await_look() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return num_looks_ > 0; });
  }
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_looks_ = 0;
  bool open_ = false;
};

// Prefix of the keys of the first reducer on a group.
constexpr const char* kFirstChannel = "brigade/status/1/";

std::unique_ptr<StallWatch> watch(c10::intrusive_ptr<c10d::Store> store,
                                  int world_size = 2) {
  return StallWatch::start(c10::make_intrusive<c10d::ProcessGroup>(
                               std::move(store), /*rank=*/0, world_size),
                           "prefix/", kNames, std::make_shared<Progress>(),
                           [] { return std::string("waits"); });
}

TEST(StallWatchTest, IsOffWithoutPeersOrStore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(watch(store, /*world_size=*/1), nullptr);
  EXPECT_EQ(watch(nullptr), nullptr);
  EXPECT_NE(watch(store), nullptr);
}

TEST(StallWatchTest, LooksAgainWhenATimeIsSet) {
  const auto store = c10::make_intrusive<ClosedStore>();
  store->open();
  const std::unique_ptr<StallWatch> watching = watch(store);
  watching->set_report_after(milliseconds{0});
  watching->set_report_after(milliseconds{4});
  store->await_look();
}

TEST(StallWatchTest, EndsWhileTheStoreBlocks) {
  const auto store = c10::make_intrusive<ClosedStore>();
  std::unique_ptr<StallWatch> watching = watch(store);
  watching->set_report_after(milliseconds{4});
  store->await_look();
  watching = nullptr;
  store->open();
}

TEST(StallWatchTest, DoesNotHangInAForkedChild) {
  std::unique_ptr<StallWatch> watching =
      watch(c10::make_intrusive<c10d::HashStore>());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    watching = nullptr;
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
}

// Waits until the value of `key` contains `text`; fails after 10 s.
void await_line(c10d::Store& store, const std::string& key,
                const std::string& text) {
  store.wait({key});
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (store.get_to_str(key).find(text) == std::string::npos) {
    if (std::chrono::steady_clock::now() > deadline) {
      FAIL() << "the last line is: " << store.get_to_str(key);
    }
    std::this_thread::yield();
  }
}

TEST(StallWatchTest, ALateRankAnswersInTheMiddleOfItsBackward) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}});
    Reducer reducer(
        model.parameters, group,
        {.bucket_plan = {{1}, {0}}, .parameter_names = model.names});
    EXPECT_THROW(reducer.set_stall_report_after(milliseconds{-1}),
                 c10::ValueError);
    reducer.set_stall_report_after(milliseconds{40});
    if (group->getRank() == 1) {
      // Continues after its answer to the other rank.
      model.parameters[0].register_hook([&](const at::Tensor&) {
        await_line(*group->getStore(),
                   absl::StrCat(kFirstChannel, "progress/answer/1"),
                   "has launched 1 of 2 buckets of iteration 1 and waits for "
                   "the gradients of parameter 0 ('p0')");
      });
    }
    step(reducer, model.loss(group->getRank()));
    EXPECT_TRUE(at::equal(model.parameters[0].grad(), model.average(0, 2)));
  });
}

TEST(StallWatchTest, ReportsAWaitForABucketAfterTheLastExchange) {
  std::mutex mutex;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> open;
  std::string reported;
  run_ranks(2, [&](const Group& group) {
    const ToyModel model(ToyModel::Sizes{{2}});
    // Completes when a stall is reported.
    const auto hook = make_comm_hook([&](c10d::GradBucket& bucket) {
      auto future =
          c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      const std::lock_guard<std::mutex> lock(mutex);
      open.push_back(future);
      return future->then(
          [tensor = bucket.getBuffer()](c10::ivalue::Future&) {
            return c10::IValue(tensor);
          },
          c10::TensorType::get());
    });
    Reducer reducer(model.parameters, group, {.comm_hook = hook});
    reducer.set_stall_report_after(milliseconds{200});
    reducer.set_stall_handler([&](const std::string& report) {
      std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
      {
        const std::lock_guard<std::mutex> lock(mutex);
        reported = report;
        futures.swap(open);
      }
      for (const auto& future : futures) future->markCompleted(c10::IValue());
    });
    step(reducer, model.loss(group->getRank()));
  });
  EXPECT_THAT(reported, HasSubstr("for its peers in iteration 1 (1 of 1 "
                                  "buckets launched)"));
}

TEST(StallWatchTest, NamesTheRankThatHasNotBegunItsBackward) {
  std::promise<std::string> promise;
  std::shared_future<std::string> reported = promise.get_future().share();
  run_ranks(2, [&](const Group& group) {
    const ToyModel model(ToyModel::Sizes{{2}});
    Reducer reducer(model.parameters, group);
    reducer.set_stall_report_after(milliseconds{200});
    if (group->getRank() == 0) {
      reducer.set_stall_handler(
          [&](const std::string& report) { promise.set_value(report); });
    }
    const at::Tensor loss = model.loss(group->getRank());
    reducer.prepare_for_backward(loss);
    if (group->getRank() == 1) reported.wait();
    loss.backward();
  });
  EXPECT_THAT(reported.get(),
              AllOf(HasSubstr("rank 0 has waited"),
                    HasSubstr("1 of 1 buckets launched"), HasSubstr("rank 1"),
                    Not(HasSubstr("All ranks"))));
}

}  // namespace
}  // namespace brigade
