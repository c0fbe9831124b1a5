// A model on a simulated device whose forward runs on the streams of a layout,
// as a program does that orders its streams rightly, and whose gradients are
// known integers.
//
// Nothing here makes the host wait, which would hide races.

#ifndef BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_MODEL_H_
#define BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_MODEL_H_

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "brigade/hooks/autograd_node.h"
#include "brigade/tests/simulated_device/stream_layout.h"

namespace brigade::testing {

class StreamedModel {
 public:
  using Sizes = std::vector<std::vector<int64_t>>;

  // With buckets of 64 bytes: several parameters in some, one in others.
  static Sizes default_sizes() { return {{4}, {3, 5}, {1}, {7}, {20}, {2, 2}}; }

  // Parameters of ones. The calling thread's current stream of the device is
  // backward's caller's.
  StreamedModel(const StreamLayout& layout, int device_index = 0,
                const Sizes& sizes = default_sizes(),
                at::ScalarType dtype = at::kFloat);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  size_t size() const { return parameters_.size(); }

  // From here on forward computes with what `read` makes of each parameter,
  // which has its values, on the stream that uses it.
  void read_through(std::function<at::Tensor(const at::Tensor&)> read) {
    read_ = std::move(read);
  }

  // Where forward uses parameter i.
  const c10::Stream& stream_of(size_t i) const { return streams_[i]; }

  // What backward of loss(step) gives parameter i, on the CPU.
  at::Tensor gradient(size_t i, int step) const;

  // Behind the current stream, which is behind it afterwards.
  at::Tensor loss(int step, const std::set<size_t>& left_out = {}) const;

  // What one parameter contributes to it.
  at::Tensor term(size_t i, int step) const;

  // As an optimizer on the current stream, which keeps parameters as they are.
  void update() const;

  void zero_grad(bool set_to_none) const;

 private:
  at::Tensor use(size_t i, const c10::Stream& stream, int step) const;

  const bool uses_both_;
  const int device_index_;
  std::function<at::Tensor(const at::Tensor&)> read_;  // empty: as they are
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> weights_;   // by parameter, integers
  std::vector<c10::Stream> streams_;  // by parameter
  // They say where gradients are accumulated.
  std::vector<NodePtr> accumulators_;
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_MODEL_H_
