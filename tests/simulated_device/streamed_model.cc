#include "brigade/tests/simulated_device/streamed_model.h"

#include <c10/core/StreamGuard.h>

#include "brigade/fsdp/sharded_tensor.h"
#include "brigade/tests/support/simulated_device/stream_test.h"

namespace brigade::testing {
namespace {

using simulated::current_stream_of;
using simulated::make_wait;
using simulated::new_stream;

std::vector<c10::Stream> streams_for(StreamLayout::Forward forward,
                                     size_t num_parameters, int device_index) {
  std::vector<c10::Stream> streams;
  for (size_t i = 0; i < num_parameters; ++i) {
    switch (forward) {
      case StreamLayout::Forward::kCaller:
        streams.push_back(current_stream_of(device_index));
        break;
      case StreamLayout::Forward::kSide:
        streams.push_back(i < 1 ? new_stream(device_index) : streams[0]);
        break;
      case StreamLayout::Forward::kTwo:
        streams.push_back(i < 2 ? new_stream(device_index) : streams[i - 2]);
        break;
      case StreamLayout::Forward::kOwn:
      case StreamLayout::Forward::kBoth:
        streams.push_back(new_stream(device_index));
        break;
    }
  }
  return streams;
}

}  // namespace

StreamedModel::StreamedModel(const StreamLayout& layout, int device_index,
                             const Sizes& sizes, at::ScalarType dtype)
    : uses_both_(layout.forward == StreamLayout::Forward::kBoth),
      device_index_(device_index),
      streams_(streams_for(layout.forward, sizes.size(), device_index)) {
  const at::TensorOptions options = simulated::on_device(dtype, device_index);
  for (size_t i = 0; i < sizes.size(); ++i) {
    parameters_.push_back(at::ones(sizes[i], options).requires_grad_());
    const at::Tensor numbers = at::arange(parameters_[i].numel(), at::kLong);
    weights_.push_back(((numbers + 7 * static_cast<int64_t>(i)) % 12 + 1)
                           .reshape(sizes[i])
                           .to(options));
    if (!layout.accumulates_in_forward) continue;
    const c10::StreamGuard on_stream(streams_[i]);
    accumulators_.push_back(
        torch::autograd::impl::grad_accumulator(parameters_[i]));
  }
}

at::Tensor StreamedModel::gradient(size_t i, int step) const {
  return weights_[i].cpu() * (step + 1) * (uses_both_ ? 2 : 1);
}

at::Tensor StreamedModel::use(size_t i, const c10::Stream& stream,
                              int step) const {
  const c10::Stream caller = current_stream_of(device_index_);
  make_wait(stream, caller);
  at::Tensor result;
  {
    const c10::StreamGuard on_stream(stream);
    // Parameters are ones. Not linear, so that gradients may have a history.
    const at::Tensor p = read_ ? read_(parameters_[i]) : parameters_[i];
    if (shard_of(p) == nullptr) p.record_stream(stream);  // perhaps a copy
    result = (p * p * weights_[i] * ((step + 1) / 2.0)).sum();
    if (result.is_complex()) result = at::real(result);
  }
  make_wait(caller, stream);
  result.record_stream(caller);
  return result;
}

at::Tensor StreamedModel::term(size_t i, int step) const {
  const at::Tensor term = use(i, streams_[i], step);
  return uses_both_ ? term + use(i, streams_[(i + 1) % size()], step) : term;
}

at::Tensor StreamedModel::loss(int step,
                               const std::set<size_t>& left_out) const {
  at::Tensor loss;
  for (size_t i = 0; i < size(); ++i) {
    if (left_out.count(i) > 0) continue;
    const at::Tensor term = this->term(i, step);
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

void StreamedModel::update() const {
  const at::NoGradGuard no_grad;
  const c10::Stream caller = current_stream_of(device_index_);
  for (const at::Tensor& parameter : parameters_) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    gradient.record_stream(caller);
    at::Tensor(parameter).sub_(gradient, /*alpha=*/0);
  }
}

void StreamedModel::zero_grad(bool set_to_none) const {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters_) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      gradient.reset();
    } else {
      gradient.detach().zero_();
    }
  }
}

}  // namespace brigade::testing
