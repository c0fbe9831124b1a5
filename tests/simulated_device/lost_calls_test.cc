// Each call by which the reducer orders streams is needed: without it, a race
// is found. So the tests of streams would see it go.

#include <torch/torch.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "brigade/reducer/bucket_replica.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/simulated_device/streamed_model.h"
#include "brigade/tests/simulated_device/streamed_training.h"
#include "brigade/tests/support/simulated_device/ordering_calls.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using simulated::DropCalls;
using simulated::OrderingCall;
using testing::StreamedModel;
using testing::StreamedTraining;
using testing::StreamLayout;

// Two buckets. Gradients come in descending order, each on its own stream: the
// second bucket is packed on that of parameter 3, and launched with the first
// one on that of parameter 0.
const ReducerOptions kTwoBuckets = {.bucket_plan = {{0, 1, 2}, {3, 4, 5}}};

using Chooses = std::function<bool(const OrderingCall&)>;

class LostCallsTest : public simulated::StreamTest {
 protected:
  LostCallsTest() { training_.emplace(kOwnStreams); }

  void TearDown() override {
    training_.reset();
    StreamTest::TearDown();
  }

  const c10::Stream& stream_of(size_t parameter) {
    return training_->model().stream_of(parameter);
  }

  // Where the group runs collectives.
  c10::Stream communication_stream() {
    std::optional<c10::Stream> found;
    const DropCalls watch([&](const OrderingCall& call) {
      if (call.kind == OrderingCall::kWait && !found) found = call.stream;
      return false;
    });
    std::vector<at::Tensor> tensors = {at::zeros({1}, simulated::on_device())};
    training_->recording().group()->allreduce(tensors)->wait();
    return *found;
  }

  struct Count {
    int needed = 0;    // without it, a race
    int needless = 0;  // without it, none
  };

  // Runs `body` again and again, each time without another one of the calls
  // that are chosen.
  Count count(const Chooses& chooses, const std::function<void()>& body) {
    simulated::expect_no_races();
    Count result;
    for (int nth = 0;; ++nth) {
      int left = nth;
      const DropCalls lost([&](const OrderingCall& call) {
        return chooses(call) && left-- == 0;
      });
      body();
      const bool is_raced = !simulated::take_races().empty();
      if (lost.num_dropped() == 0) {
        EXPECT_FALSE(is_raced);
        EXPECT_GT(nth, 0) << "there is no such call";
        return result;
      }
      ++(is_raced ? result.needed : result.needless);
    }
  }

  // In a step whose gradients are dropped unread.
  int count_needless_in_step(const Chooses& chooses) {
    return count(chooses,
                 [&] {
                   training_->step(1);
                   training_->zero_grad();
                 })
        .needless;
  }

  // Of what is recorded on the stream that delivers, behind the first result.
  int count_needed_in_delivery(const std::function<void()>& body) {
    const c10::Stream delivering = simulated::current_stream_of();
    const c10::Stream communication = communication_stream();
    bool has_begun = false;
    return count(
               [&](const OrderingCall& call) {
                 has_begun = has_begun || (call.kind == OrderingCall::kWait &&
                                           call.stream == delivering &&
                                           call.other == communication);
                 return has_begun && call.kind == OrderingCall::kRecordUse &&
                        call.stream == delivering;
               },
               [&] {
                 has_begun = false;
                 body();
               })
        .needed;
  }

  // Timelines have events of their own, which order nothing.
  void make_reducer(ReducerOptions options) {
    training_->make_reducer(std::move(options));
    training_->reducer().set_timeline_sample_rate(0);
  }

  void train_one_step(ReducerOptions options) {
    make_reducer(std::move(options));
    training_->step(0);
    training_->zero_grad();
  }

  // Gives it work.
  static bool uses(const OrderingCall& call, const c10::Stream& stream) {
    return call.kind != OrderingCall::kSwitch && call.stream == stream;
  }

  static Chooses records_on(const c10::Stream& stream) {
    return [stream](const OrderingCall& call) {
      return call.kind == OrderingCall::kRecordUse && call.stream == stream;
    };
  }

  static ParameterTable table_of_one() {
    return *ParameterTable::create(
        {{at::ones({4}, simulated::on_device()).requires_grad_()}}, {}, {});
  }

  void pack_on_another_stream(DenseReplica& replica) {
    simulated::make_wait(packing_, simulated::current_stream_of());
    const c10::StreamGuard on_stream(packing_);
    replica.pack(/*scale=*/1, /*unused_slots=*/{});
  }

  static constexpr auto kViews = DenseReplica::Delivery::kViews;
  const c10::Stream packing_ = simulated::new_stream();
  static constexpr StreamLayout kOwnStreams = {
      .forward = StreamLayout::Forward::kOwn, .accumulates_in_forward = true};
  std::optional<StreamedTraining> training_;
};

ReducerOptions as_copies(ReducerOptions options) {
  options.gradient_as_bucket_view = false;
  return options;
}

TEST_F(LostCallsTest, PackWaitsForGradientsOfOtherStreams) {
  train_one_step(kTwoBuckets);
  EXPECT_EQ(count_needless_in_step([&](const OrderingCall& call) {
              return call.kind == OrderingCall::kWait &&
                     call.stream == stream_of(3) &&
                     (call.other == stream_of(4) || call.other == stream_of(5));
            }),
            0);
}

TEST_F(LostCallsTest, LaunchWaitsForPackOnAnotherStream) {
  train_one_step(kTwoBuckets);
  EXPECT_EQ(count_needless_in_step([&](const OrderingCall& call) {
              return call.kind == OrderingCall::kWait &&
                     call.stream == stream_of(0) && call.other == stream_of(3);
            }),
            0);
}

// The events that these two wait for: what is recorded on the streams of one
// bucket, until backward comes to the next.
TEST_F(LostCallsTest, EventsOfPackAreRecorded) {
  train_one_step(kTwoBuckets);
  for (const size_t parameter : {3, 4, 5}) {
    bool in_bucket = false;
    EXPECT_EQ(count(
                  [&](const OrderingCall& call) {
                    in_bucket = in_bucket && !uses(call, stream_of(2));
                    return in_bucket && call.kind == OrderingCall::kRecord &&
                           call.stream == stream_of(parameter);
                  },
                  [&] {
                    const at::Tensor loss = training_->loss(1);
                    training_->reducer().prepare_for_backward(loss);
                    in_bucket = true;
                    loss.backward();
                    training_->zero_grad();
                  })
                  .needless,
              0)
        << parameter;
  }
}

// The second of the two events that are recorded where the second bucket is
// packed: behind the sum of what local replicas have packed. They are on one
// device, so that gradients come in one order: replica 1's are first.
TEST_F(LostCallsTest, LaunchWaitsForTheSumOfReplicas) {
  const StreamedModel first(kOwnStreams);
  const StreamedModel second(kOwnStreams);
  Reducer reducer({first.parameters(), second.parameters()},
                  training_->recording().group(), kTwoBuckets);
  reducer.set_timeline_sample_rate(0);
  bool in_bucket = false;
  int num_records = 0;
  const auto step = [&] {
    const at::Tensor before = first.loss(1);
    const at::Tensor loss = before + second.loss(1);
    reducer.prepare_for_backward(loss);
    num_records = 0;
    in_bucket = true;
    loss.backward();
    in_bucket = false;
    first.zero_grad(/*set_to_none=*/true);
    second.zero_grad(/*set_to_none=*/true);
  };
  step();
  EXPECT_EQ(count(
                [&](const OrderingCall& call) {
                  in_bucket = in_bucket && !uses(call, first.stream_of(2));
                  return in_bucket && call.kind == OrderingCall::kRecord &&
                         call.stream == first.stream_of(3) &&
                         ++num_records == 2;
                },
                step)
                .needed,
            1);
}

// One for each gradient that another stream has made. Backward is called on the
// packing stream, where nothing else would be recorded.
TEST_F(LostCallsTest, GradientsAreRecordedOnThePackingStream) {
  simulated::make_wait(stream_of(3), simulated::default_stream());
  const c10::StreamGuard on_caller(stream_of(3));
  train_one_step(kTwoBuckets);
  bool in_backward = false;
  bool joined = false;
  const Count recorded = count(
      [&](const OrderingCall& call) {
        // The last wait of the bucket's join, and what comes right behind it.
        if (call.kind != OrderingCall::kRecordUse &&
            call.kind != OrderingCall::kSwitch) {
          joined = in_backward && call.kind == OrderingCall::kWait &&
                   call.stream == stream_of(3) && call.other == stream_of(4);
        }
        return joined && call.kind == OrderingCall::kRecordUse &&
               call.stream == stream_of(3);
      },
      [&] {
        const at::Tensor loss = training_->loss(1);
        training_->reducer().prepare_for_backward(loss);
        in_backward = true;
        loss.backward();
        in_backward = false;
        training_->zero_grad();
      });
  EXPECT_EQ(recorded.needed, 2);
}

TEST_F(LostCallsTest, BuffersAreZeroedBeforeTheyArePacked) {
  StreamLayout layout = kOwnStreams;
  layout.is_made_on_side = true;
  const auto first_step = [&] {
    training_.reset();
    simulated::expect_no_races();
    training_.emplace(layout);
    make_reducer(kTwoBuckets);
    training_->step(0);
    training_->zero_grad();
    training_->end_reducer();
  };
  EXPECT_EQ(count(
                [&](const OrderingCall& call) {
                  return call.kind == OrderingCall::kWait &&
                         call.stream == stream_of(3) &&
                         call.other != stream_of(4) &&
                         call.other != stream_of(5) &&
                         call.other != simulated::current_stream_of();
                },
                first_step)
                .needless,
            0);
}

// It goes back to the stream that it was allocated on: what travels, the
// gradients' own memory or another.
TEST_F(LostCallsTest, MemoryOfABucketIsRecordedOnThePackingStream) {
  const ParameterTable table = table_of_one();
  for (const at::ScalarType wire_dtype : {at::kFloat, at::kHalf}) {
    EXPECT_EQ(count(records_on(packing_),
                    [&] {
                      DenseReplica replica(
                          table, 0, {{0}}, wire_dtype, kViews,
                          DenseReplica::Allocation::kAtConstruction);
                      pack_on_another_stream(replica);
                      table[0].mutable_grad().reset();
                    })
                  .needed,
              1)
        << wire_dtype;
  }
}

// One that backward's caller has made, and a view replaces.
TEST_F(LostCallsTest, AReplacedGradientIsRecordedOnThePackingStream) {
  const ParameterTable table = table_of_one();
  DenseReplica replica(table, 0, {{0}}, at::kFloat, kViews,
                       DenseReplica::Allocation::kAtConstruction);
  EXPECT_EQ(count(records_on(packing_),
                  [&] {
                    table[0].mutable_grad() = at::ones_like(table[0]);
                    pack_on_another_stream(replica);
                  })
                .needed,
            1);
}

TEST_F(LostCallsTest, ResultsAreWaitedFor) {
  train_one_step(as_copies(kTwoBuckets));
  const c10::Stream communication = communication_stream();
  EXPECT_EQ(count_needless_in_step([&](const OrderingCall& call) {
              return call.kind == OrderingCall::kWait &&
                     call.stream == simulated::current_stream_of() &&
                     call.other == communication;
            }),
            0);
}

// One for each gradient, which other streams have made.
TEST_F(LostCallsTest, GradientsAreRecordedWhereTheyAreDelivered) {
  train_one_step(as_copies(kTwoBuckets));
  EXPECT_EQ(count_needed_in_delivery([&] {
              training_->step(1);
              training_->zero_grad();
            }),
            static_cast<int>(training_->model().size()));
}

// What an unused parameter's gradient was before it was reduced.
TEST_F(LostCallsTest, GradientsSetAsideAreRecordedWhereTheyArePutBack) {
  ReducerOptions options = kTwoBuckets;
  options.find_unused_parameters = true;
  make_reducer(options);
  training_->step(0);
  training_->zero_grad(/*set_to_none=*/false);
  EXPECT_EQ(count_needed_in_delivery([&] {
              training_->step(1, {1});
              training_->zero_grad(/*set_to_none=*/false);
            }),
            1);
}

TEST_F(LostCallsTest, TheUsedMapIsWaitedFor) {
  ReducerOptions options = kTwoBuckets;
  options.find_unused_parameters = true;
  options.skip_all_reduce_unused_parameters = true;
  train_one_step(options);
  const c10::Stream communication = communication_stream();
  bool is_first = true;
  EXPECT_EQ(count(
                [&](const OrderingCall& call) {
                  return call.kind == OrderingCall::kWait &&
                         call.other == communication &&
                         std::exchange(is_first, false);
                },
                [&] {
                  is_first = true;
                  training_->step(1);
                  training_->zero_grad();
                })
                .needless,
            0);
}

TEST_F(LostCallsTest, StagingOfTheUsedMapIsNotReusedWhileItIsCopied) {
  ReducerOptions options = kTwoBuckets;
  options.find_unused_parameters = true;
  make_reducer(options);
  EXPECT_EQ(count(
                [](const OrderingCall& call) {
                  return call.kind == OrderingCall::kHoldPinned;
                },
                [&] {
                  training_->step(0);
                  training_->step(1, {1});
                })
                .needless,
            0);
}

}  // namespace
}  // namespace brigade
