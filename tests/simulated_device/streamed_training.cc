#include "brigade/tests/simulated_device/streamed_training.h"

#include <utility>

#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade::testing {
namespace {

using simulated::default_stream;
using simulated::make_wait;
using simulated::new_stream;

constexpr int kNumDevices = 2;

// One per device, behind the default one.
std::vector<c10::Stream> side_streams() {
  std::vector<c10::Stream> streams;
  for (int d = 0; d < kNumDevices; ++d) {
    streams.push_back(new_stream(d));
    make_wait(streams.back(), default_stream(d));
  }
  return streams;
}

}  // namespace

StreamedTraining::StreamedTraining(const StreamLayout& layout, int num_replicas,
                                   StreamedModel::Sizes sizes,
                                   at::ScalarType dtype)
    : layout_(layout), recording_(kWorldSize) {
  if (layout.calls_from_side) on_caller_.emplace(side_streams());
  for (int r = 0; r < num_replicas; ++r) {
    models_.emplace_back(layout, r, sizes, dtype);
  }
}

StreamedTraining::~StreamedTraining() {
  simulated::synchronize_all();
  for (const Expected& e : expected_) {
    EXPECT_TRUE(at::equal(e.found.cpu(), e.expected))
        << "parameter " << e.parameter << " at step " << e.step << " has "
        << e.found.cpu() << ", not " << e.expected;
  }
}

void StreamedTraining::make_reducer(ReducerOptions options) {
  if (options.bucket_caps_bytes == ReducerOptions().bucket_caps_bytes) {
    options.bucket_caps_bytes = {64};
  }
  std::optional<c10::MultiStreamGuard> on_side;
  if (layout_.is_made_on_side) on_side.emplace(side_streams());
  std::vector<std::vector<at::Tensor>> replicas;
  for (const StreamedModel& model : models_) {
    replicas.push_back(model.parameters());
  }
  reducer_.emplace(std::move(replicas), recording_.group(), std::move(options));
}

at::Tensor StreamedTraining::loss(int step, const std::set<size_t>& left_out) {
  at::Tensor sum;
  for (const StreamedModel& model : models_) {
    const at::Tensor loss = model.loss(step, left_out).to(simulated::device());
    sum = sum.defined() ? sum + loss : loss;
  }
  return sum;
}

void StreamedTraining::step(int step, const std::set<size_t>& left_out) {
  const at::Tensor loss = this->loss(step, left_out);
  reducer_->prepare_for_backward(loss);
  loss.backward();
}

void StreamedTraining::expect_gradients(int step,
                                        const std::set<size_t>& but_for,
                                        double factor) {
  for (size_t i = 0; i < models_[0].size(); ++i) {
    if (but_for.count(i) == 0) expect_gradient(i, step, factor);
  }
}

void StreamedTraining::expect_gradient(size_t parameter, int step,
                                       double factor) {
  for (size_t r = 0; r < models_.size(); ++r) {
    const at::Tensor& gradient = models_[r].parameters()[parameter].grad();
    ASSERT_TRUE(gradient.defined()) << parameter << " at step " << step;
    gradient.record_stream(simulated::current_stream_of(static_cast<int>(r)));
    expected_.push_back(
        {.found = gradient.detach().clone(),
         .expected = models_[r].gradient(parameter, step) * factor,
         .parameter = parameter,
         .step = step});
  }
}

void StreamedTraining::update() {
  for (const StreamedModel& model : models_) model.update();
}

void StreamedTraining::zero_grad(bool set_to_none) {
  for (const StreamedModel& model : models_) model.zero_grad(set_to_none);
}

}  // namespace brigade::testing
