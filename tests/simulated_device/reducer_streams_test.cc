// Every mode of the reducer on every layout of streams: exact gradients and no
// races.

#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <ostream>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/comm_hooks/hook_traits.h"
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
using testing::StreamedTraining;
using testing::StreamLayout;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Hook = std::shared_ptr<c10d::CommHookInterface>;
using Tensors = std::vector<at::Tensor>;

constexpr int kNumSteps = 4;

// Runs `step` several times. Every other step discards its gradients unread,
// since a read records a use of their memory. Buckets are rebuilt after the
// first step.
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

void train(StreamedTraining& training, ReducerOptions options) {
  training.make_reducer(std::move(options));
  train(training, [&](int s) { training.step(s); });
}

// Runs `function` on a new stream, after the work of the current stream, which
// then waits for it.
template <typename Function>
void on_new_stream(const Function& function) {
  const c10::Stream caller = simulated::current_stream_of();
  const c10::Stream stream = new_stream();
  make_wait(stream, caller);
  {
    const c10::StreamGuard on_stream(stream);
    function(stream);
  }
  make_wait(caller, stream);
}

void plain(StreamedTraining& training, ReducerOptions options) {
  train(training, std::move(options));
  EXPECT_EQ(training.reducer().statistics().rebuilds, 1);
}

void gradients_zeroed_in_place(StreamedTraining& training,
                               ReducerOptions options) {
  training.make_reducer(std::move(options));
  for (int s = 0; s < kNumSteps; ++s) {
    training.step(s);
    training.expect_gradients(s);
    training.update();
    training.zero_grad(/*set_to_none=*/false);
  }
}

void gradients_accumulated_locally(StreamedTraining& training,
                                   ReducerOptions options) {
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

void local_forward_between(StreamedTraining& training, ReducerOptions options) {
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

void backwards_on_other_streams(StreamedTraining& training,
                                ReducerOptions options) {
  training.make_reducer(std::move(options));
  train(training, [&](int s) {
    const Tensors losses = {training.loss(s, {0, 2, 4}),
                            training.loss(s, {1, 3, 5})};
    training.reducer().prepare_for_backward(losses);
    for (const at::Tensor& loss : losses) {
      on_new_stream([&](const c10::Stream& stream) {
        loss.record_stream(stream);
        loss.backward();
      });
    }
  });
}

// Every other step leaves out parameters 1 and 3.
template <bool set_to_none>
void unused_parameters(StreamedTraining& training, ReducerOptions options) {
  options.find_unused_parameters = true;
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

void unused_buckets_skipped(StreamedTraining& training,
                            ReducerOptions options) {
  options.find_unused_parameters = true;
  options.skip_all_reduce_unused_parameters = true;
  training.make_reducer(std::move(options));
  train(training, [&](int s) { training.step(s, {2, 4, 5}); }, {2, 4, 5});
}

// The second step rebuilds buckets on a stream that no other stream waits for.
void prepared_on_another_stream(StreamedTraining& training,
                                ReducerOptions options) {
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

void static_graph(StreamedTraining& training, ReducerOptions options) {
  options.static_graph = true;
  training.make_reducer(std::move(options));
  train(training, [&](int s) { training.step(s, {3}); }, {3});
}

void shadowed(StreamedTraining& training, ReducerOptions options) {
  training.make_reducer(std::move(options));
  train(training, [&](int s) {
    training.step(s);
    on_new_stream([&](const c10::Stream& /*stream*/) {
      training.reducer().shadow_iteration();
    });
  });
}

void finalized_on_another_stream(StreamedTraining& training,
                                 ReducerOptions options) {
  training.make_reducer(std::move(options));
  training.reducer().set_manual_finalization(true);
  train(training, [&](int s) {
    training.step(s);
    on_new_stream([&](const c10::Stream& /*stream*/) {
      training.reducer().finalize_backward();
    });
  });
}

void compressed_to_half(StreamedTraining& training, ReducerOptions options) {
  options.comm_hook = fp16_hook(training.recording().group());
  train(training, std::move(options));
}

// Returns a hook that computes before and after its collective.
Hook casting_hook(const Group& group) {
  return make_comm_hook([group](c10d::GradBucket& bucket) {
    Tensors halves = {bucket.getBuffer().to(at::kHalf)};
    return group->allreduce(halves)->getFuture()->then(
        [](c10::ivalue::Future& sum) {
          return c10::IValue(
              sum.value().toTensorVector()[0].to(at::kFloat).div(kWorldSize));
        },
        c10::TensorType::get());
  });
}

// Returns a hook that computes before, between and after two collectives.
Hook hook_of_two_collectives(const Group& group) {
  return make_comm_hook([group](c10d::GradBucket& bucket) {
    Tensors halves = {bucket.getBuffer().to(at::kHalf)};
    return then_collective(
               group->allreduce(halves)->getFuture(),
               [group](const c10::IValue& sum) {
                 Tensors means = {
                     sum.toTensorVector()[0].to(at::kFloat).div(kWorldSize)};
                 return group->broadcast(means)->getFuture();
               })
        ->then(
            [](c10::ivalue::Future& means) {
              return c10::IValue(means.value().toTensorVector()[0].clone());
            },
            c10::TensorType::get());
  });
}

void second_collectives(StreamedTraining& training, ReducerOptions options) {
  options.comm_hook = hook_of_two_collectives(training.recording().group());
  train(training, std::move(options));
}

void steps_in_backward(StreamedTraining& training, ReducerOptions options) {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> found;
  options.comm_hook = step_in_backward(
      all_reduce_hook(training.recording().group()),
      [&](const at::Tensor& parameter) {
        at::Tensor(parameter).sub_(parameter.grad(), /*alpha=*/0);
        const std::lock_guard<std::mutex> lock(mutex);
        found[parameter.unsafeGetTensorImpl()] = parameter.grad().clone();
      });
  training.make_reducer(std::move(options));
  for (int s = 0; s < kNumSteps; ++s) {
    found.clear();
    training.step(s);
    simulated::synchronize_all();
    for (size_t i = 0; i < training.model().size(); ++i) {
      const at::Tensor& parameter = training.model().parameters()[i];
      EXPECT_FALSE(parameter.grad().defined());
      EXPECT_TRUE(at::equal(found[parameter.unsafeGetTensorImpl()].cpu(),
                            training.model().gradient(i, s)))
          << "parameter " << i << ", step " << s;
    }
  }
}

void timed(StreamedTraining& training, ReducerOptions options) {
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

// Completes collectives on a thread with default current streams, like a
// network.
void completed_on_another_thread(StreamedTraining& training,
                                 ReducerOptions options) {
  RecordingGroup& recording = training.recording();
  recording.hold();
  std::jthread network([&](const std::stop_token& over) {
    while (!over.stop_requested()) {
      for (const size_t sequence : recording.held()) {
        recording.complete(sequence);
      }
      std::this_thread::yield();
    }
  });
  options.comm_hook = casting_hook(recording.group());
  train(training, std::move(options));
  network.request_stop();
  network.join();
  recording.release();
}

// Checks races only. Ranks of this group are identical; cpu_parity_test.cc
// checks sums.
void reproducible(StreamedTraining& training, ReducerOptions options) {
  options.reproducible = true;
  training.make_reducer(std::move(options));
  for (int s = 0; s < kNumSteps; ++s) {
    training.step(s);
    if (s % 2 == 1) training.update();
    training.zero_grad();
  }
}

// A reproducible bucket takes two collectives. A rank that fails before its
// first launch replaces both.
void reproducible_and_backward_throws(StreamedTraining& training,
                                      ReducerOptions options) {
  options.reproducible = true;
  training.make_reducer(std::move(options));
  const auto num_launched = [&] { return training.recording().log().size(); };
  size_t at_first = 0;
  for (int s = 0; s < 3; ++s) {  // the second step rebuilds buckets
    at_first = num_launched();
    training.step(0);
    training.zero_grad();
  }
  const size_t per_step = num_launched() - at_first;
  for (const at::Tensor& parameter : training.model().parameters()) {
    parameter.register_hook(
        [](const at::Tensor&) { throw std::runtime_error("in backward"); });
  }
  EXPECT_ANY_THROW(training.step(1));
  // The device thread may end its backward later.
  while (num_launched() < at_first + 2 * per_step) std::this_thread::yield();
  EXPECT_FALSE(training.reducer().can_continue());
  EXPECT_EQ(num_launched(), at_first + 2 * per_step);
  simulated::synchronize_all();
  training.zero_grad();
}

void gradients_in_another_memory_order(StreamedTraining& training,
                                       ReducerOptions options) {
  training.make_reducer(std::move(options));
  const at::Tensor parameter = training.model().parameters()[1];
  for (int s = 0; s < kNumSteps; ++s) {
    parameter.mutable_grad() = at::zeros({5, 3}, simulated::on_device()).t();
    training.step(s);
    training.expect_gradients(s);
    training.zero_grad();
  }
}

void destroyed_while_collectives_are_open(StreamedTraining& training,
                                          ReducerOptions options) {
  training.make_reducer(std::move(options));
  training.reducer().set_manual_finalization(true);
  training.recording().hold();
  training.step(0);
  training.end_reducer();
  training.zero_grad();
  training.recording().release();
}

// The second bucket is packed and waits for the launch of the first one.
template <bool is_half>
void destroyed_between_backwards(StreamedTraining& training,
                                 ReducerOptions options) {
  options.bucket_plan = {{0, 1, 2}, {3, 4, 5}};
  if (is_half) options.comm_hook = fp16_hook(training.recording().group());
  training.make_reducer(std::move(options));
  training.step(0, {0, 1, 2});
  training.end_reducer();
  training.zero_grad();
}

// All ranks fail before they deliver the second bucket.
void collective_fails_at_completion(StreamedTraining& training,
                                    ReducerOptions options) {
  options.comm_hook = casting_hook(training.recording().group());
  training.make_reducer(std::move(options));
  training.step(0);
  training.zero_grad();
  training.recording().fail_at_completion(
      training.recording().log().size() + 1,
      std::make_exception_ptr(std::runtime_error("the network")));
  EXPECT_ANY_THROW(training.step(1));
  simulated::synchronize_all();
  training.zero_grad();
  for (int s = 2; s < 4; ++s) {
    training.step(s);
    training.expect_gradients(s);
    training.zero_grad();
  }
}

void backward_throws(StreamedTraining& training, ReducerOptions options) {
  bool throws = false;
  training.make_reducer(std::move(options));
  training.model().parameters()[2].register_hook([&](const at::Tensor&) {
    if (throws) throw std::runtime_error("in backward");
  });
  train(training, [&](int s) { training.step(s); });
  throws = true;
  EXPECT_ANY_THROW(training.step(kNumSteps));
  training.reducer().end_iteration();  // on any thread
  // LibTorch joins no streams after a backward that throws.
  simulated::synchronize_all();
  training.zero_grad();
  EXPECT_FALSE(training.reducer().can_continue());
}

void buffers_before_forward(StreamedTraining& training,
                            ReducerOptions options) {
  training.make_reducer(std::move(options));
  at::Tensor buffer = at::zeros({3}, simulated::on_device());
  train(training, [&](int s) {
    training.reducer().broadcast_before_forward({buffer}, /*source=*/0);
    buffer.add_(1);  // like an update of running means in forward
    training.step(s);
  });
  EXPECT_TRUE(buffer.cpu().eq(kNumSteps).all().item<bool>());
}

struct Scenario {
  const char* name;
  void (*run)(StreamedTraining&, ReducerOptions);
  int num_replicas = 1;
};

std::ostream& operator<<(std::ostream& out, const Scenario& scenario) {
  return out << scenario.name;
}

const Scenario kScenarios[] = {
    {"Plain", plain},
    {"GradientsZeroedInPlace", gradients_zeroed_in_place},
    {"GradientsAccumulatedLocally", gradients_accumulated_locally},
    {"LocalForwardBetween", local_forward_between},
    {"BackwardsOnOtherStreams", backwards_on_other_streams},
    {"PreparedOnAnotherStream", prepared_on_another_stream},
    {"UnusedParametersDropped", unused_parameters<true>},
    {"UnusedParametersKept", unused_parameters<false>},
    {"UnusedBucketsSkipped", unused_buckets_skipped},
    {"StaticGraph", static_graph},
    {"Shadowed", shadowed},
    {"FinalizedOnAnotherStream", finalized_on_another_stream},
    {"CompressedToHalf", compressed_to_half},
    {"SecondCollectives", second_collectives},
    {"StepsInBackward", steps_in_backward},
    {"Timed", timed},
    {"CompletedOnAnotherThread", completed_on_another_thread},
    {"LocalReplicas", train, /*num_replicas=*/2},
    {"Reproducible", reproducible},
    {"ReproducibleAndBackwardThrows", reproducible_and_backward_throws},
    {"GradientsInAnotherMemoryOrder", gradients_in_another_memory_order},
    {"DestroyedBetweenBackwards", destroyed_between_backwards<false>},
    {"DestroyedBetweenBackwardsInHalf", destroyed_between_backwards<true>},
    {"DestroyedWhileCollectivesAreOpen", destroyed_while_collectives_are_open},
    {"BackwardThrows", backward_throws},
    {"BuffersBeforeForward", buffers_before_forward},
    {"CollectiveFailsAtCompletion", collective_fails_at_completion},
};

// Scenario, gradient_as_bucket_view (with four unconfirmed iterations).
class ReducerStreamsTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<Scenario, bool>> {};

TEST_P(ReducerStreamsTest, GradientsAreExactOnEveryLayout) {
  const auto& [scenario, views] = GetParam();
  for (const StreamLayout& layout : all_stream_layouts()) {
    SCOPED_TRACE(name_of(layout));
    {
      StreamedTraining training(layout, scenario.num_replicas);
      scenario.run(training, {.gradient_as_bucket_view = views,
                              .max_unconfirmed_iterations = views ? 4 : 1});
    }
    simulated::expect_no_races();
  }
}

INSTANTIATE_TEST_SUITE_P(, ReducerStreamsTest,
                         ::testing::Combine(::testing::ValuesIn(kScenarios),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param).name,
                                               std::get<1>(info.param)
                                                   ? "AsViewsFourAhead"
                                                   : "AsCopies");
                         });

}  // namespace
}  // namespace brigade
