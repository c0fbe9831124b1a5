// DistributedDataParallel on every layout of streams: buffers, mixed precision,
// no_sync and join.

#include <torch/torch.h>

#include <utility>

#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/tests/simulated_device/streamed_training.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::all_stream_layouts;
using testing::StreamedModel;
using testing::StreamedTraining;
using testing::StreamLayout;

struct StreamedModuleImpl : torch::nn::Module {
  explicit StreamedModuleImpl(const StreamedModel& streamed) : model(streamed) {
    for (size_t i = 0; i < model.size(); ++i) {
      register_parameter(c10::str("p", i), model.parameters()[i]);
    }
    seen = register_buffer("seen", at::zeros({1}, simulated::on_device()));
  }

  at::Tensor forward(int step) {
    seen.add_(1);
    precision = model.parameters()[0].scalar_type();
    return model.loss(step);
  }

  const StreamedModel& model;
  at::Tensor seen;
  at::ScalarType precision = at::kFloat;  // in the last forward
};
TORCH_MODULE(StreamedModule);

// The parameter is gradient_as_bucket_view.
class DdpStreamsTest : public simulated::StreamTest,
                       public ::testing::WithParamInterface<bool> {
 protected:
  DistributedDataParallelOptions options() const {
    return {.reducer = {.bucket_cap_bytes = {64},
                        .gradient_as_bucket_view = GetParam()}};
  }

  // Every other step first runs a backward under no_sync.
  static void train(const StreamLayout& layout,
                    DistributedDataParallelOptions options,
                    at::ScalarType precision) {
    StreamedTraining training(layout);
    StreamedModule module(training.model());
    DistributedDataParallel model(module, training.recording().group(),
                                  std::move(options));
    for (int s = 0; s < 4; ++s) {
      if (s % 2 == 1) {
        const NoSync local = model.no_sync();
        model(s).backward();
      }
      model(s).backward();
      EXPECT_EQ(module->precision, precision);
      training.expect_gradients(s, {}, s % 2 + 1);
      training.update();
      training.zero_grad();
    }
  }
};

TEST_P(DdpStreamsTest, TrainsOnEveryLayout) {
  for (const StreamLayout& layout : all_stream_layouts()) {
    SCOPED_TRACE(name_of(layout));
    train(layout, options(), at::kFloat);
    simulated::expect_no_races();
  }
}

TEST_P(DdpStreamsTest, TrainsInLowerPrecisionOnEveryLayout) {
  for (const StreamLayout& layout : all_stream_layouts()) {
    SCOPED_TRACE(name_of(layout));
    DistributedDataParallelOptions mixed = options();
    mixed.mixed_precision = MixedPrecision{.parameters = at::kBFloat16};
    train(layout, std::move(mixed), at::kBFloat16);
    simulated::expect_no_races();
  }
}

// Identical ranks run out of data at the same time.
TEST_P(DdpStreamsTest, JoinsOnEveryLayout) {
  for (const StreamLayout& layout : all_stream_layouts()) {
    SCOPED_TRACE(name_of(layout));
    StreamedTraining training(layout);
    StreamedModule module(training.model());
    DistributedDataParallel model(module, training.recording().group(),
                                  options());
    int num_steps = 0;
    join(model, [&] {
      for (; num_steps < 4; ++num_steps) {
        model(num_steps).backward();
        training.expect_gradients(num_steps);
        training.update();
        training.zero_grad();
      }
    });
    EXPECT_EQ(num_steps, 4);
    simulated::expect_no_races();
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, DdpStreamsTest, ::testing::Bool());

}  // namespace
}  // namespace brigade
