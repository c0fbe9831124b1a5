// Every mode of the reducer on every layout of streams: exact gradients, and
// all that uses a gradient or a bucket behind what it needs.

#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/tests/simulated_device/streamed_training.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using simulated::make_wait;
using simulated::new_stream;
using testing::all_stream_layouts;
using testing::kWorldSize;
using testing::StreamedModel;
using testing::StreamedTraining;
using testing::StreamLayout;

constexpr int kNumSteps = 4;

// Steps of any kind, of which every other one drops its gradients unread:
// whoever reads them tells their memory of it. After the first one buckets are
// rebuilt.
template <typename Step>
void train(StreamedTraining& training, const Step& step,
           const std::set<size_t>& not_compared = {}) {
  for (int s = 0; s < kNumSteps; ++s) {
    step(s);
    if (s % 2 == 1) {
      training.expect_gradients(s, not_compared);
      training.update();
    }
    training.zero_grad();
  }
}

void plain(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  train(training, [&](int s) { training.step(s); });
  EXPECT_EQ(training.reducer().statistics().rebuilds, 1);
}

void gradients_dropped_unread(const StreamLayout& layout,
                              ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  for (int s = 0; s < kNumSteps; ++s) {
    training.step(s);
    training.zero_grad();
  }
}

void gradients_zeroed_in_place(const StreamLayout& layout,
                               ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  for (int s = 0; s < kNumSteps; ++s) {
    training.step(s);
    training.expect_gradients(s);
    training.update();
    training.zero_grad(/*set_to_none=*/false);
  }
}

void gradients_accumulated_locally(const StreamLayout& layout,
                                   ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  for (int s = 0; s < kNumSteps; ++s) {
    training.loss(s).backward();
    training.loss(s).backward();
    training.step(s);
    training.expect_gradients(s, {}, 3);
    training.update();
    training.zero_grad(s % 2 == 0);
  }
}

void local_forward_between(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  for (int s = 0; s < kNumSteps; ++s) {
    const at::Tensor loss = training.loss(s);
    training.reducer().prepare_for_backward(loss);
    const at::Tensor local = training.loss(s);
    training.reducer().note_local_forward({local});
    local.backward();
    loss.backward();
    training.expect_gradients(s, {}, 2);
    training.update();
    training.zero_grad();
  }
}

void two_backwards(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  train(training, [&](int s) {
    const std::vector<at::Tensor> losses = {training.loss(s, {0, 2, 4}),
                                            training.loss(s, {1, 3, 5})};
    training.reducer().prepare_for_backward(losses);
    for (const at::Tensor& loss : losses) loss.backward();
  });
}

void backwards_on_other_streams(const StreamLayout& layout,
                                ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  const c10::Stream caller = simulated::current_stream_of();
  train(training, [&](int s) {
    const std::vector<at::Tensor> losses = {training.loss(s, {0, 2, 4}),
                                            training.loss(s, {1, 3, 5})};
    training.reducer().prepare_for_backward(losses);
    for (const at::Tensor& loss : losses) {
      const c10::Stream stream = new_stream();
      make_wait(stream, caller);
      {
        const c10::StreamGuard on_stream(stream);
        loss.record_stream(stream);
        loss.backward();
      }
      make_wait(caller, stream);
    }
  });
}

// Parameters 1 and 3 are used in every other step.
void unused_parameters(const StreamLayout& layout, ReducerOptions options,
                       bool set_to_none) {
  options.find_unused_parameters = true;
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  for (int s = 0; s < 2 * kNumSteps; ++s) {
    const std::set<size_t> left_out =
        s % 2 == 1 ? std::set<size_t>{1, 3} : std::set<size_t>{};
    training.step(s, left_out);
    if (s % 4 < 2) training.expect_gradients(s, left_out);
    if (!set_to_none && s % 2 == 1) {
      for (const size_t i : left_out) training.expect_gradient(i, s, 0);
    }
    training.zero_grad(set_to_none);
  }
}

void unused_parameters_dropped(const StreamLayout& layout,
                               ReducerOptions options) {
  unused_parameters(layout, std::move(options), /*set_to_none=*/true);
}

void unused_parameters_kept(const StreamLayout& layout,
                            ReducerOptions options) {
  unused_parameters(layout, std::move(options), /*set_to_none=*/false);
}

// Gradients that are not dropped keep what an earlier step gave them.
void globally_unused_parameters(const StreamLayout& layout,
                                ReducerOptions options) {
  options.find_unused_parameters = true;
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  for (int s = 0; s < kNumSteps; ++s) {
    training.zero_grad();
    training.step(2 * s);
    for (const size_t i : {0, 2, 4, 5}) {
      training.model().parameters()[i].mutable_grad().reset();
    }
    training.step(2 * s + 1, {1, 3});
    training.expect_gradient(1, 2 * s);
    training.expect_gradient(3, 2 * s);
    training.expect_gradients(2 * s + 1, {1, 3});
  }
}

void unused_buckets_skipped(const StreamLayout& layout,
                            ReducerOptions options) {
  options.find_unused_parameters = true;
  options.skip_all_reduce_unused_parameters = true;
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  train(training, [&](int s) { training.step(s, {2, 4, 5}); }, {2, 4, 5});
}

// Buckets are laid out anew there, which nothing waits for.
void prepared_elsewhere(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  train(training, [&](int s) {
    const at::Tensor loss = training.loss(s);
    const c10::Stream stream = new_stream();
    make_wait(stream, simulated::current_stream_of());
    {
      const c10::StreamGuard on_stream(stream);
      training.reducer().prepare_for_backward(loss);
    }
    loss.backward();
  });
}

void static_graph(const StreamLayout& layout, ReducerOptions options) {
  options.static_graph = true;
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  train(training, [&](int s) { training.step(s, {3}); }, {3});
}

// Behind what the current stream has been given, which then waits for it.
template <typename Function>
void on_new_stream(const Function& function) {
  const c10::Stream caller = simulated::current_stream_of();
  const c10::Stream stream = new_stream();
  make_wait(stream, caller);
  {
    const c10::StreamGuard on_stream(stream);
    function();
  }
  make_wait(caller, stream);
}

void shadowed(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  train(training, [&](int s) {
    training.step(s);
    on_new_stream([&] { training.reducer().shadow_iteration(); });
  });
}

void half_precision_on_the_wire(const StreamLayout& layout,
                                ReducerOptions options) {
  StreamedTraining training(layout);
  options.comm_hook = fp16_hook(training.recording().group());
  training.make_reducer(std::move(options));
  train(training, [&](int s) { training.step(s); });
}

// A hook of the user's that computes before and behind its collective.
std::shared_ptr<c10d::CommHookInterface> casting_hook(
    c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return make_comm_hook([group](c10d::GradBucket& bucket) {
    std::vector<at::Tensor> halves = {bucket.getBuffer().to(at::kHalf)};
    return group->allreduce(halves)->getFuture()->then(
        [](c10::ivalue::Future& sum) {
          return c10::IValue(
              sum.value().toTensorVector()[0].to(at::kFloat).div(kWorldSize));
        },
        c10::TensorType::get());
  });
}

void make_reducer_with_casting_hook(StreamedTraining& training,
                                    ReducerOptions options) {
  options.comm_hook = casting_hook(training.recording().group());
  training.make_reducer(std::move(options));
}

void hook_with_a_continuation(const StreamLayout& layout,
                              ReducerOptions options) {
  StreamedTraining training(layout);
  make_reducer_with_casting_hook(training, std::move(options));
  train(training, [&](int s) { training.step(s); });
}

void hook_changed(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  train(training, [&](int s) {
    if (s == 1) {
      training.reducer().set_comm_hook(fp16_hook(training.recording().group()));
    }
    if (s == 2) training.reducer().set_comm_hook(nullptr);
    training.step(s);
  });
}

void timed(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  training.reducer().set_timeline_sample_rate(1);
  train(training, [&](int s) {
    training.reducer().forward_begins();
    training.step(s);
  });
  for (const UnitTimes& bucket : training.reducer().timeline().units) {
    EXPECT_LE(bucket.pack_begin_ns, bucket.pack_end_ns);
    EXPECT_LE(bucket.pack_end_ns, bucket.launch_ns);
    EXPECT_LE(bucket.launch_ns, bucket.complete_ns);
  }
}

// As over a network: on a thread whose current streams are the default ones.
void completed_on_another_thread(const StreamLayout& layout,
                                 ReducerOptions options) {
  StreamedTraining training(layout);
  training.recording().delay_by(
      [](const RecordedCollective&) { return std::chrono::microseconds(50); });
  make_reducer_with_casting_hook(training, std::move(options));
  train(training, [&](int s) { training.step(s); });
}

void lazily_allocated(const StreamLayout& layout, ReducerOptions options) {
  options.lazy_bucket_allocation = true;
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  train(training, [&](int s) { training.step(s); });
}

void finalized_elsewhere(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  training.reducer().set_manual_finalization(true);
  train(training, [&](int s) {
    training.step(s);
    on_new_stream([&] { training.reducer().finalize_backward(); });
  });
}

void local_replicas(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout, /*num_replicas=*/2);
  training.make_reducer(std::move(options));
  train(training, [&](int s) { training.step(s); });
}

// Of identical ranks a group can't give slices that differ: what the sums are
// is reproducible_test.cc's.
void summed_in_order(const StreamLayout& layout, ReducerOptions options,
                     std::optional<int> row_size) {
  options.reproducible = true;
  options.reproducible_row_size = row_size;
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  for (int s = 0; s < kNumSteps; ++s) {
    training.step(s);
    if (s % 2 == 1) training.update();
    training.zero_grad();
  }
}

void summed_in_order_of_ranks(const StreamLayout& layout,
                              ReducerOptions options) {
  summed_in_order(layout, std::move(options), std::nullopt);
}

void summed_in_order_of_rows(const StreamLayout& layout,
                             ReducerOptions options) {
  summed_in_order(layout, std::move(options), kWorldSize / 2);
}

// A bucket is two collectives there, and so is what stands in for it on a rank
// that has failed before it launched any.
void summed_in_order_where_backward_throws(const StreamLayout& layout,
                                           ReducerOptions options) {
  options.reproducible = true;
  options.rebuild_buckets = false;
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  const auto num_launched = [&] { return training.recording().log().size(); };
  const size_t at_first = num_launched();
  training.step(0);
  training.zero_grad();
  const size_t of_a_step = num_launched() - at_first;
  for (const at::Tensor& parameter : training.model().parameters()) {
    parameter.register_hook(
        [](const at::Tensor&) { throw std::runtime_error("in backward"); });
  }
  EXPECT_ANY_THROW(training.step(1));
  // A backward on a device's thread may tell of its end a little later.
  EXPECT_TRUE(training.recording().wait_for_launches(at_first + 2 * of_a_step));
  EXPECT_FALSE(training.reducer().can_continue());
  EXPECT_EQ(num_launched(), at_first + 2 * of_a_step);
  simulated::synchronize_all();
  training.zero_grad();
}

void complex_gradients(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout, /*num_replicas=*/1,
                            StreamedModel::default_sizes(), at::kComplexFloat);
  training.make_reducer(std::move(options));
  train(training, [&](int s) { training.step(s); });
}

void large_gradients(const StreamLayout& layout, ReducerOptions options) {
  options.bucket_caps_bytes = {200 << 10};
  StreamedTraining training(layout, /*num_replicas=*/1,
                            {{30000}, {20, 1000}, {5}, {40000}});
  training.make_reducer(std::move(options));
  train(training, [&](int s) { training.step(s); });
}

void gradients_in_another_memory_order(const StreamLayout& layout,
                                       ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  const at::Tensor parameter = training.model().parameters()[1];
  for (int s = 0; s < kNumSteps; ++s) {
    parameter.mutable_grad() = at::zeros({5, 3}, simulated::on_device()).t();
    training.step(s);
    training.expect_gradients(s);
    training.zero_grad();
  }
}

void gradients_with_a_history(const StreamLayout& layout,
                              ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  train(training, [&](int s) {
    const at::Tensor loss = training.loss(s);
    training.reducer().prepare_for_backward(loss);
    loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  });
}

void destroyed_at_once(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  for (int s = 0; s < 2; ++s) training.step(s);
  training.end_reducer();
  training.zero_grad();
}

void destroyed_while_collectives_are_open(const StreamLayout& layout,
                                          ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  training.reducer().set_manual_finalization(true);
  training.recording().hold();
  training.step(0);
  training.end_reducer();
  training.zero_grad();
  training.recording().release();
}

// The second bucket has been packed on one stream or another, and waits for the
// first to be launched.
void destroyed_between_backwards(const StreamLayout& layout,
                                 ReducerOptions options) {
  options.bucket_plan = {{0, 1, 2}, {3, 4, 5}};
  for (const bool is_half : {false, true}) {
    StreamedTraining training(layout);
    const auto group = training.recording().group();
    options.comm_hook = is_half ? fp16_hook(group) : nullptr;
    training.make_reducer(options);
    training.step(0, {0, 1, 2});
    training.end_reducer();
    training.zero_grad();
  }
}

// The iteration is over, and so is the group. Gradients may be dropped.
void expect_closed(StreamedTraining& training) {
  training.reducer().end_iteration();  // on whatever thread it is ending
  // LibTorch leaves the streams of a backward that throws as they are.
  simulated::synchronize_all();
  training.zero_grad();
  EXPECT_FALSE(training.reducer().can_continue());
  EXPECT_THROW(training.step(kNumSteps), c10::DistBackendError);
}

// The collective of the second bucket fails.
template <typename Fail>
void train_until_failure(StreamedTraining& training, const Fail& fail) {
  training.step(0);
  training.zero_grad();
  fail(training.recording().log().size() + 1);
  EXPECT_ANY_THROW(training.step(1));
}

std::exception_ptr failure() {
  return std::make_exception_ptr(std::runtime_error("the network"));
}

void collective_fails_at_launch(const StreamLayout& layout,
                                ReducerOptions options) {
  StreamedTraining training(layout);
  make_reducer_with_casting_hook(training, std::move(options));
  train_until_failure(training, [&](size_t sequence) {
    training.recording().fail_at_launch(sequence, failure());
  });
  expect_closed(training);
}

// All ranks fail alike, before they have delivered.
void collective_fails_at_completion(const StreamLayout& layout,
                                    ReducerOptions options) {
  StreamedTraining training(layout);
  make_reducer_with_casting_hook(training, std::move(options));
  train_until_failure(training, [&](size_t sequence) {
    training.recording().fail_at_completion(sequence, failure());
  });
  simulated::synchronize_all();
  training.zero_grad();
  for (int s = 2; s < 4; ++s) {
    training.step(s);
    training.expect_gradients(s);
    training.zero_grad();
  }
}

void backward_throws(const StreamLayout& layout, ReducerOptions options) {
  bool throws = false;
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  training.model().parameters()[2].register_hook([&](const at::Tensor&) {
    if (throws) throw std::runtime_error("in backward");
  });
  for (int s = 0; s < kNumSteps; ++s) {
    training.step(s);
    training.expect_gradients(s);
    training.zero_grad();
  }
  throws = true;
  EXPECT_ANY_THROW(training.step(kNumSteps));
  expect_closed(training);
}

at::Tensor make_buffer() {
  return at::zeros({3}, at::TensorOptions(simulated::device()));
}

void buffers_before_forward(const StreamLayout& layout,
                            ReducerOptions options) {
  StreamedTraining training(layout);
  training.make_reducer(std::move(options));
  at::Tensor buffer = make_buffer();
  train(training, [&](int s) {
    training.reducer().broadcast_before_forward({buffer}, /*source=*/0);
    buffer.add_(1);  // as forward does with running means
    training.step(s);
  });
  EXPECT_TRUE(buffer.cpu().eq(kNumSteps).all().item<bool>());
}

// The host does not wait for peers where backward ends: it hears of a failure
// when a later step is prepared.
void hear_of_a_failure_later(StreamedTraining& training, int steps_later) {
  training.recording().answer_statuses_with([](const RankStatus& own) {
    std::vector<RankStatus> by_rank(kWorldSize, own);
    if (own.kind == StatusKind::kEnd && own.iteration == 3) {
      by_rank[1].kind = StatusKind::kFailed;
    }
    return by_rank;
  });
  const int heard_in = 2 + steps_later;
  for (int s = 0; s < heard_in; ++s) {
    if (s == 2 && steps_later > 1) training.recording().hold_statuses();
    training.step(s);
    training.expect_gradients(s);
    training.zero_grad();
  }
  training.recording().release_statuses();
  EXPECT_THROW(training.step(heard_in), c10::DistBackendError);
  expect_closed(training);
}

void a_peer_has_failed(const StreamLayout& layout, ReducerOptions options) {
  StreamedTraining training(layout);
  const int steps_later = options.max_unconfirmed_iterations;
  training.make_reducer(std::move(options));
  hear_of_a_failure_later(training, steps_later);
}

void a_peer_has_failed_under_a_users_hook(const StreamLayout& layout,
                                          ReducerOptions options) {
  StreamedTraining training(layout);
  const int steps_later = options.max_unconfirmed_iterations;
  make_reducer_with_casting_hook(training, std::move(options));
  hear_of_a_failure_later(training, steps_later);
}

// All that it tells its peers of its results is the end of the iteration, or
// its failure: it may fail alone.
void a_users_hook_failed_alone(const StreamLayout& layout,
                               ReducerOptions options) {
  StreamedTraining training(layout);
  make_reducer_with_casting_hook(training, std::move(options));
  std::vector<StatusKind> told;
  training.recording().answer_statuses_with([&](const RankStatus& own) {
    told.push_back(own.kind);
    std::vector<RankStatus> by_rank(kWorldSize, own);
    if (own.kind == StatusKind::kFailed) by_rank[1].kind = StatusKind::kEnd;
    return by_rank;
  });
  for (int s = 0; s < kNumSteps; ++s) {
    training.step(s);
    training.expect_gradients(s);
    EXPECT_EQ(told, std::vector{StatusKind::kEnd});
    told.clear();
    training.zero_grad();
  }
  training.recording().fail_at_completion(training.recording().log().size(),
                                          failure());
  EXPECT_ANY_THROW(training.step(kNumSteps));
  expect_closed(training);
  EXPECT_EQ(told, std::vector{StatusKind::kFailed});
}

struct Scenario {
  const char* name;
  void (*run)(const StreamLayout&, ReducerOptions);
};

std::ostream& operator<<(std::ostream& out, const Scenario& scenario) {
  return out << scenario.name;
}

const Scenario kScenarios[] = {
    {"Plain", plain},
    {"GradientsDroppedUnread", gradients_dropped_unread},
    {"GradientsZeroedInPlace", gradients_zeroed_in_place},
    {"GradientsAccumulatedLocally", gradients_accumulated_locally},
    {"LocalForwardBetween", local_forward_between},
    {"TwoBackwards", two_backwards},
    {"BackwardsOnOtherStreams", backwards_on_other_streams},
    {"PreparedElsewhere", prepared_elsewhere},
    {"UnusedParametersDropped", unused_parameters_dropped},
    {"UnusedParametersKept", unused_parameters_kept},
    {"GloballyUnusedParameters", globally_unused_parameters},
    {"UnusedBucketsSkipped", unused_buckets_skipped},
    {"StaticGraph", static_graph},
    {"Shadowed", shadowed},
    {"HalfPrecisionOnTheWire", half_precision_on_the_wire},
    {"HookWithAContinuation", hook_with_a_continuation},
    {"HookChanged", hook_changed},
    {"Timed", timed},
    {"CompletedOnAnotherThread", completed_on_another_thread},
    {"LazilyAllocated", lazily_allocated},
    {"FinalizedElsewhere", finalized_elsewhere},
    {"LocalReplicas", local_replicas},
    {"ComplexGradients", complex_gradients},
    {"SummedInOrderOfRanks", summed_in_order_of_ranks},
    {"SummedInOrderOfRows", summed_in_order_of_rows},
    {"SummedInOrderWhereBackwardThrows", summed_in_order_where_backward_throws},
    {"LargeGradients", large_gradients},
    {"GradientsInAnotherMemoryOrder", gradients_in_another_memory_order},
    {"GradientsWithAHistory", gradients_with_a_history},
    {"DestroyedAtOnce", destroyed_at_once},
    {"DestroyedBetweenBackwards", destroyed_between_backwards},
    {"DestroyedWhileCollectivesAreOpen", destroyed_while_collectives_are_open},
    {"BackwardThrows", backward_throws},
    {"BuffersBeforeForward", buffers_before_forward},
    {"APeerHasFailed", a_peer_has_failed},
    {"APeerHasFailedUnderAUsersHook", a_peer_has_failed_under_a_users_hook},
    {"AUsersHookFailedAlone", a_users_hook_failed_alone},
    {"CollectiveFailsAtLaunch", collective_fails_at_launch},
    {"CollectiveFailsAtCompletion", collective_fails_at_completion},
};

// Scenario x gradients as views x iterations that may be unconfirmed.
class ReducerStreamsTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<Scenario, bool, int>> {};

TEST_P(ReducerStreamsTest, IsRightOnEveryLayout) {
  const auto& [scenario, views, depth] = GetParam();
  for (const StreamLayout& layout : all_stream_layouts()) {
    SCOPED_TRACE(name_of(layout));
    scenario.run(layout, {.gradient_as_bucket_view = views,
                          .max_unconfirmed_iterations = depth});
    simulated::expect_no_races();
  }
}

std::string name_of_mode(
    const ::testing::TestParamInfo<ReducerStreamsTest::ParamType>& info) {
  const auto& [scenario, views, depth] = info.param;
  return absl::StrCat(scenario.name, views ? "AsViews" : "AsCopies",
                      depth == 1 ? "" : "FourAhead");
}

INSTANTIATE_TEST_SUITE_P(Copies, ReducerStreamsTest,
                         ::testing::Combine(::testing::ValuesIn(kScenarios),
                                            ::testing::Values(false),
                                            ::testing::Values(1)),
                         name_of_mode);
INSTANTIATE_TEST_SUITE_P(Views, ReducerStreamsTest,
                         ::testing::Combine(::testing::ValuesIn(kScenarios),
                                            ::testing::Values(true),
                                            ::testing::Values(4)),
                         name_of_mode);

}  // namespace
}  // namespace brigade
