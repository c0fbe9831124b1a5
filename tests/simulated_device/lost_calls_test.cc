// Each stream-ordering call of the reducer is needed: without it the race
// detector finds a race.

#include "brigade/tests/simulated_device/lost_calls.h"

#include <torch/torch.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/reducer/bucket_replica.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/simulated_device/streamed_training.h"
#include "gtest/gtest.h"

namespace brigade {
namespace lost_calls_test {

using testing::LostCallsTest;
using testing::StreamedModel;
using testing::StreamedTraining;
using testing::StreamLayout;

constexpr StreamLayout kOwnStreams = {.forward = StreamLayout::Forward::kOwn,
                                      .accumulates_in_forward = true};

// Gradients become ready in descending order, each on its own stream, "g0" to
// "g5". The second bucket is packed on g3. Both buckets are launched on g0.
ReducerOptions two_buckets() { return {.bucket_plan = {{0, 1, 2}, {3, 4, 5}}}; }

// Returns true for calls that enqueue work on `stream`.
bool uses(const std::string& call, const std::string& stream) {
  return call == "records " + stream || call.starts_with(stream + " ");
}

class LostReducerCallsTest : public LostCallsTest {
 protected:
  LostReducerCallsTest() { start(kOwnStreams); }

  void TearDown() override {
    training_.reset();
    LostCallsTest::TearDown();
  }

  void start(const StreamLayout& layout) {
    training_.emplace(layout);
    name_streams_of(training_->model());
  }

  void name_streams_of(const StreamedModel& model) {
    for (size_t i = 0; i < model.size(); ++i) {
      name(model.stream_of(i), absl::StrCat("g", i));
    }
  }

  // Disables timelines, whose events order nothing.
  void make_reducer(ReducerOptions options) {
    training_->make_reducer(std::move(options));
    training_->reducer().set_timeline_sample_rate(0);
  }

  void train_one_step(ReducerOptions options = two_buckets()) {
    make_reducer(std::move(options));
    step();
  }

  // Discards the gradients unread.
  void step() {
    training_->step(1);
    training_->zero_grad();
  }

  std::function<void()> armed_step() {
    return [this] {
      arm();
      step();
    };
  }

  // Arms for the backward only.
  void step_armed_in_backward() {
    const at::Tensor loss = training_->loss(1);
    training_->reducer().prepare_for_backward(loss);
    arm();
    loss.backward();
    disarm();
    training_->zero_grad();
  }

  // Counts needed record_stream() calls of the delivering stream, from the wait
  // for the first result on.
  int count_needed_in_delivery(const std::function<void()>& body) {
    on_call([this](const std::string& call) {
      if (call == "default waits for group") arm();
    });
    return count_needed("default uses memory", body);
  }

  std::optional<StreamedTraining> training_;
};

TEST_F(LostReducerCallsTest, PackWaitsForGradientsOfOtherStreams) {
  train_one_step();
  expect_needed("g3 waits for g4", armed_step());
  expect_needed("g3 waits for g5", armed_step());
}

TEST_F(LostReducerCallsTest, LaunchWaitsForPackOnAnotherStream) {
  train_one_step();
  expect_needed("g0 waits for g3", armed_step());
}

// Armed until backward reaches the next bucket.
TEST_F(LostReducerCallsTest, EventsOfPackAreRecorded) {
  train_one_step();
  on_call([this](const std::string& call) {
    if (uses(call, "g2")) disarm();
  });
  for (const char* call : {"records g3", "records g4", "records g5"}) {
    expect_needed(call, [&] { step_armed_in_backward(); });
  }
}

// Packing the second bucket records two events; the second one follows the sum
// of local replicas. Both replicas are on one device, so gradients have one
// order: those of replica 1 are first.
TEST_F(LostReducerCallsTest, LaunchWaitsForTheSumOfReplicas) {
  const StreamedModel first(kOwnStreams);
  const StreamedModel second(kOwnStreams);
  name_streams_of(first);
  Reducer reducer({first.parameters(), second.parameters()},
                  training_->recording().group(), two_buckets());
  reducer.set_timeline_sample_rate(0);
  bool in_bucket = false;
  int num_records = 0;
  on_call([&](const std::string& call) {
    in_bucket = in_bucket && !uses(call, "g2");
    disarm();
    if (in_bucket && call == "records g3" && ++num_records == 2) arm();
  });
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
  EXPECT_EQ(count_needed("records g3", step), 1);
}

// One use for each gradient of another stream, right after the bucket's last
// wait. Backward runs on the packing stream, which records no other use.
TEST_F(LostReducerCallsTest, GradientsAreRecordedOnThePackingStream) {
  const c10::Stream packing = training_->model().stream_of(3);
  simulated::make_wait(packing, simulated::default_stream());
  const c10::StreamGuard on_caller(packing);
  train_one_step();
  bool in_backward = false;
  on_call([&](const std::string& call) {
    if (call.ends_with(" uses memory") || call.starts_with("switches ")) return;
    disarm();
    if (in_backward && call == "g3 waits for g4") arm();
  });
  EXPECT_EQ(count_needed("g3 uses memory",
                         [&] {
                           const at::Tensor loss = training_->loss(1);
                           training_->reducer().prepare_for_backward(loss);
                           in_backward = true;
                           loss.backward();
                           in_backward = false;
                           training_->zero_grad();
                         }),
            2);
}

TEST_F(LostReducerCallsTest, BuffersAreZeroedBeforeTheyArePacked) {
  StreamLayout layout = kOwnStreams;
  layout.is_made_on_side = true;
  expect_needed("g3 waits for group", [&] {  // that of the constructor
    training_.reset();
    simulated::expect_no_races();
    start(layout);
    make_reducer(two_buckets());
    armed_step()();
    training_->end_reducer();
  });
}

TEST_F(LostReducerCallsTest, ResultsAreWaitedFor) {
  ReducerOptions copies = two_buckets();
  copies.gradient_as_bucket_view = false;
  train_one_step(copies);
  expect_needed("default waits for group", armed_step());
}

// One use for each gradient, all made on other streams.
TEST_F(LostReducerCallsTest, GradientsAreRecordedWhereTheyAreDelivered) {
  ReducerOptions copies = two_buckets();
  copies.gradient_as_bucket_view = false;
  train_one_step(copies);
  EXPECT_EQ(count_needed_in_delivery([&] { step(); }),
            static_cast<int>(training_->model().size()));
}

// An unused parameter gets back the gradient that it had before the reduction.
TEST_F(LostReducerCallsTest, SavedGradientsAreRecordedWhereTheyAreRestored) {
  ReducerOptions options = two_buckets();
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

TEST_F(LostReducerCallsTest, TheUsedParameterBitmapIsWaitedFor) {
  ReducerOptions options = two_buckets();
  options.find_unused_parameters = true;
  options.skip_all_reduce_unused_parameters = true;
  train_one_step(options);
  bool is_first = true;
  on_call([&](const std::string& call) {
    disarm();
    if (call == "default waits for group" && std::exchange(is_first, false)) {
      arm();
    }
  });
  expect_needed("default waits for group", [&] {
    is_first = true;
    step();
  });
}

TEST_F(LostReducerCallsTest, StagingOfTheBitmapIsNotReusedWhileItIsCopied) {
  ReducerOptions options = two_buckets();
  options.find_unused_parameters = true;
  make_reducer(options);
  expect_needed("pinned memory is held", [&] {
    arm();
    training_->step(0);
    training_->step(1, {1});
  });
}

class LostReplicaCallsTest : public LostCallsTest {
 protected:
  DenseReplica make_replica(at::ScalarType wire_dtype) const {
    return DenseReplica(table_, 0, {{0}}, wire_dtype,
                        DenseReplica::Delivery::kViews);
  }

  void pack_on_another_stream(DenseReplica& replica) {
    const c10::Stream packing = stream_named("packing");
    simulated::make_wait(packing, simulated::current_stream_of());
    const c10::StreamGuard on_stream(packing);
    arm();
    replica.pack(/*scale=*/1, /*unused_slots=*/{});
  }

  const ParameterTable table_{
      {{at::ones({4}, simulated::on_device()).requires_grad_()}}, {}, {}};
};

// The allocator returns memory to the stream that allocated it. Without a cast
// the gradients are views into the bucket; with a cast the bucket has other
// memory.
TEST_F(LostReplicaCallsTest, MemoryOfABucketIsRecordedOnThePackingStream) {
  for (const at::ScalarType wire_dtype : {at::kFloat, at::kHalf}) {
    EXPECT_EQ(count_needed("packing uses memory",
                           [&] {
                             DenseReplica replica = make_replica(wire_dtype);
                             pack_on_another_stream(replica);
                             table_[0].mutable_grad().reset();
                           }),
              1)
        << wire_dtype;
  }
}

// A view replaces a gradient that the caller of backward has made.
TEST_F(LostReplicaCallsTest, AReplacedGradientIsRecordedOnThePackingStream) {
  DenseReplica replica = make_replica(at::kFloat);
  EXPECT_EQ(count_needed("packing uses memory",
                         [&] {
                           table_[0].mutable_grad() = at::ones_like(table_[0]);
                           pack_on_another_stream(replica);
                         }),
            1);
}

}  // namespace lost_calls_test
}  // namespace brigade
