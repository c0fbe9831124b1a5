#include "brigade/tests/simulated_device/streamed_model.h"

#include <c10/core/StreamGuard.h>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/sharded_tensor.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade::testing {
namespace {

using simulated::current_stream_of;
using simulated::make_wait;
using simulated::new_stream;
using Forward = StreamLayout::Forward;

constexpr const char* kForwardNames[] = {
    "the caller's stream", "a side stream", "two streams",
    "a stream per parameter", "two streams per parameter"};

// The release build, which scripts/test.sh --all runs, tries all of them.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kTriesFew = true;
#else
constexpr bool kTriesFew = false;
#endif

// With buckets of 64 bytes: several parameters in some, one in others.
const std::vector<std::vector<int64_t>> kSizes = {{4}, {3, 5}, {1},
                                                  {7}, {20},   {2, 2}};

std::vector<StreamLayout> make_layouts() {
  constexpr int kOfAForward = 8;
  std::vector<StreamLayout> layouts;
  for (const Forward forward : {Forward::kCaller, Forward::kSide, Forward::kTwo,
                                Forward::kOwn, Forward::kBoth}) {
    // The few differ in everything else too.
    const int chosen = static_cast<int>(forward) * 3 % kOfAForward;
    for (int bits = 0; bits < kOfAForward; ++bits) {
      if (kTriesFew && bits != chosen) continue;
      layouts.push_back({.forward = forward,
                         .calls_from_side = (bits & 4) != 0,
                         .is_made_on_side = (bits & 2) != 0,
                         .accumulates_in_forward = (bits & 1) != 0});
    }
  }
  return layouts;
}

std::vector<c10::Stream> streams_for(Forward forward, size_t num_parameters,
                                     int device_index) {
  std::vector<c10::Stream> streams;
  for (size_t i = 0; i < num_parameters; ++i) {
    const size_t period = forward == Forward::kSide  ? 1
                          : forward == Forward::kTwo ? 2
                                                     : num_parameters;
    streams.push_back(forward == Forward::kCaller
                          ? current_stream_of(device_index)
                      : i < period ? new_stream(device_index)
                                   : streams[i - period]);
  }
  return streams;
}

}  // namespace

std::string name_of(const StreamLayout& layout) {
  return absl::StrCat(
      "forward on ", kForwardNames[static_cast<int>(layout.forward)],
      layout.calls_from_side ? ", called from a side stream" : "",
      layout.is_made_on_side ? ", reducer made on a side stream" : "",
      layout.accumulates_in_forward ? ", accumulates in forward's" : "");
}

const std::vector<StreamLayout>& all_stream_layouts() {
  static const auto* const layouts =
      new std::vector<StreamLayout>(make_layouts());
  return *layouts;
}

StreamedModel::StreamedModel(const StreamLayout& layout, int device_index)
    : uses_both_(layout.forward == StreamLayout::Forward::kBoth),
      device_index_(device_index),
      streams_(streams_for(layout.forward, kSizes.size(), device_index)) {
  const at::TensorOptions options =
      simulated::on_device(at::kFloat, device_index);
  for (size_t i = 0; i < kSizes.size(); ++i) {
    parameters_.push_back(at::ones(kSizes[i], options).requires_grad_());
    const at::Tensor numbers = at::arange(parameters_[i].numel(), at::kLong);
    weights_on_cpu_.push_back(((numbers + 7 * static_cast<int64_t>(i)) % 12 + 1)
                                  .reshape(kSizes[i])
                                  .to(at::kFloat));
    weights_.push_back(weights_on_cpu_.back().to(options));
    if (!layout.accumulates_in_forward) continue;
    const c10::StreamGuard on_stream(streams_[i]);
    accumulators_.push_back(
        torch::autograd::impl::grad_accumulator(parameters_[i]));
  }
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

ExpectedGradients::~ExpectedGradients() {
  simulated::synchronize_all();
  for (const auto& [found, expected, name] : expected_) {
    EXPECT_TRUE(at::equal(found.cpu(), expected))
        << name << " is " << found.cpu() << ", not " << expected;
  }
}

void ExpectedGradients::add(const at::Tensor& found, at::Tensor expected,
                            const std::string& name) {
  found.record_stream(current_stream_of(found.device().index()));
  expected_.push_back({found.detach().clone(), std::move(expected), name});
}

}  // namespace brigade::testing
