// Comm hooks that do more than one sum per bucket, on every layout of streams:
// second collectives, optimizers that step in backward, routes.

#include <torch/torch.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/comm_hooks/routing_hook.h"
#include "brigade/comm_hooks/chained_collectives.h"
#include "brigade/tests/simulated_device/streamed_training.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace hook_streams_test {

using testing::all_stream_layouts;
using testing::kWorldSize;
using testing::StreamedTraining;
using testing::StreamLayout;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Hook = std::shared_ptr<c10d::CommHookInterface>;

constexpr int kNumSteps = 4;

// Gradients as views.
class HookStreamsTest : public simulated::StreamTest,
                        public ::testing::WithParamInterface<bool> {
 protected:
  static ReducerOptions options() {
    return {.gradient_as_bucket_view = GetParam()};
  }

  template <typename Train>
  static void on_every_layout(const Train& train) {
    for (const StreamLayout& layout : all_stream_layouts()) {
      SCOPED_TRACE(name_of(layout));
      train(layout);
      simulated::expect_no_races();
    }
  }
};

void train(StreamedTraining& training) {
  for (int s = 0; s < kNumSteps; ++s) {
    training.step(s);
    if (s % 2 == 1) {
      training.expect_gradients(s);
      training.update();
    }
    training.zero_grad();
  }
}

// Computes before the first collective, between both and behind the second.
Hook hook_of_two_collectives(const Group& group) {
  return make_comm_hook([group](c10d::GradBucket& bucket) {
    std::vector<at::Tensor> halves = {bucket.getBuffer().to(at::kHalf)};
    return then_collective(
               group->allreduce(halves)->getFuture(),
               [group](const c10::IValue& sum) {
                 std::vector<at::Tensor> means = {
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

TEST_P(HookStreamsTest, SecondCollectivesAreBehindTheFirst) {
  on_every_layout([](const StreamLayout& layout) {
    StreamedTraining training(layout);
    ReducerOptions options = HookStreamsTest::options();
    options.comm_hook = hook_of_two_collectives(training.recording().group());
    training.make_reducer(std::move(options));
    train(training);
  });
}

TEST_P(HookStreamsTest, ParametersStepBehindTheirGradients) {
  on_every_layout([](const StreamLayout& layout) {
    StreamedTraining training(layout);
    std::mutex mutex;
    std::unordered_map<const c10::TensorImpl*, at::Tensor> found;
    ReducerOptions options = HookStreamsTest::options();
    options.comm_hook = step_in_backward(
        all_reduce_hook(training.recording().group()),
        [&](const at::Tensor& parameter) {
          at::Tensor target = parameter;
          target.sub_(parameter.grad(), /*alpha=*/0);
          const std::lock_guard<std::mutex> lock(mutex);
          found[parameter.unsafeGetTensorImpl()] = parameter.grad().clone();
        });
    training.make_reducer(std::move(options));
    for (int s = 0; s < kNumSteps; ++s) {
      found.clear();
      training.step(s);
      const std::vector<at::Tensor>& parameters = training.model().parameters();
      simulated::synchronize_all();
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_FALSE(parameters[i].grad().defined());
        EXPECT_TRUE(at::equal(found[parameters[i].unsafeGetTensorImpl()].cpu(),
                              training.model().gradient(i, s)))
            << "parameter " << i << ", step " << s;
      }
    }
  });
}

TEST_P(HookStreamsTest, BucketsGoByTheirRoutes) {
  on_every_layout([](const StreamLayout& layout) {
    StreamedTraining training(layout);
    const Group group = training.recording().group();
    const std::vector<at::Tensor>& parameters = training.model().parameters();
    ReducerOptions options = HookStreamsTest::options();
    options.bucket_plan = {{5}, {3, 4}, {0, 1, 2}};
    options.rebuild_buckets = false;
    options.comm_hook = std::make_shared<RoutingHook>(
        all_reduce_hook(group),
        std::vector<Route>{{.parameters = {parameters[3], parameters[4]},
                            .hook = fp16_hook(group)},
                           {.parameters = {parameters[5]},
                            .hook = hook_of_two_collectives(group)}});
    training.make_reducer(std::move(options));
    train(training);
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, HookStreamsTest, ::testing::Bool());

}  // namespace hook_streams_test
}  // namespace brigade
