// Layouts of a training step over streams, a model on a simulated device whose
// forward runs on the streams of a layout and orders them rightly, and checks
// of its gradients, which are known integers.
//
// Programs may use any of these layouts, and LibTorch promises that backward is
// right then. Nothing here makes the host wait, which would hide races.

#ifndef BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_MODEL_H_
#define BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_MODEL_H_

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "brigade/hooks/autograd_hooks.h"

namespace brigade::testing {

struct StreamLayout {
  // The streams that use parameters and compute their gradients.
  enum class Forward {
    kCaller,  // backward's caller's
    kSide,    // another one
    kTwo,     // two others in turn
    kOwn,     // one for each parameter
    kBoth,    // each parameter on its own one and on its neighbour's
  };

  Forward forward = Forward::kCaller;
  // Backward's caller is not on the default stream.
  bool calls_from_side = false;
  // The reducer, and at first its buckets, are made on another stream.
  bool is_made_on_side = false;
  // Gradients are accumulated, and buckets packed, on the stream that used the
  // parameter in forward; otherwise on the one that made the reducer.
  bool accumulates_in_forward = false;
};

std::string name_of(const StreamLayout& layout);

// All that differ; under AddressSanitizer one for each kind of forward.
const std::vector<StreamLayout>& all_stream_layouts();

class StreamedModel {
 public:
  // Parameters of ones. The calling thread's current stream of the device is
  // that of backward's caller.
  explicit StreamedModel(const StreamLayout& layout, int device_index = 0);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  size_t size() const { return parameters_.size(); }

  // From here on forward computes with the value of `read`, on the stream that
  // uses the parameter.
  void read_through(std::function<at::Tensor(const at::Tensor&)> read) {
    read_ = std::move(read);
  }

  // The stream on which forward uses parameter i.
  const c10::Stream& stream_of(size_t i) const { return streams_[i]; }

  // The gradient of parameter i of loss(step), on the CPU.
  at::Tensor gradient(size_t i, int step) const {
    return weights_on_cpu_[i] * (step + 1) * (uses_both_ ? 2 : 1);
  }

  // Ordered after the current stream, which is ordered after it.
  at::Tensor loss(int step, const std::set<size_t>& left_out = {}) const;

  // The contribution of one parameter to it.
  at::Tensor term(size_t i, int step) const;

  // Steps as an optimizer on the current stream that keeps parameters as they
  // are.
  void update() const;

  void zero_grad(bool set_to_none) const;

 private:
  at::Tensor use(size_t i, const c10::Stream& stream, int step) const;

  const bool uses_both_;
  const int device_index_;
  std::function<at::Tensor(const at::Tensor&)> read_;  // empty: as they are
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> weights_on_cpu_;  // by parameter, integers
  std::vector<at::Tensor> weights_;
  std::vector<c10::Stream> streams_;   // by parameter
  std::vector<NodePtr> accumulators_;  // made where gradients accumulate
};

// Copies of gradients and their expected values, compared when it ends: who
// reads a value waits for the device, and so hides missing waits.
class ExpectedGradients {
 public:
  // Fails the current test for each that differs.
  ~ExpectedGradients();
  // `found` was written on its device's current stream or after it.
  void add(const at::Tensor& found, at::Tensor expected,
           const std::string& name);

 private:
  struct Expected {
    at::Tensor found;
    at::Tensor expected;
    std::string name;
  };
  std::vector<Expected> expected_;
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SIMULATED_DEVICE_STREAMED_MODEL_H_
