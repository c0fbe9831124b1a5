// As many parameters as wanted, of 4 elements each, and next to no computation:
// what is left of a step is what autograd and a reducer cost per parameter.
//
// Thread safety: none.

#ifndef BRIGADE_BENCHMARKS_SUPPORT_TINY_MODEL_H_
#define BRIGADE_BENCHMARKS_SUPPORT_TINY_MODEL_H_

#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace brigade::benchmarks {

class TinyModel {
 public:
  explicit TinyModel(int64_t num_parameters) : input_(at::ones({4})) {
    for (int64_t i = 0; i < num_parameters; ++i) {
      parameters_.push_back(at::ones({4}).requires_grad_());
    }
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  int64_t gradient_bytes() const {
    return static_cast<int64_t>(parameters_.size() * parameters_[0].nbytes());
  }

  void clear_gradients() {
    for (const at::Tensor& parameter : parameters_) {
      parameter.mutable_grad().reset();
    }
  }

  // A chain of one operation per parameter; its sum.
  at::Tensor forward() const {
    at::Tensor x = input_;
    for (const at::Tensor& parameter : parameters_) {
      x = at::addcmul(x, parameter, input_);
    }
    return x.sum();
  }

 private:
  std::vector<at::Tensor> parameters_;
  at::Tensor input_;
};

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_SUPPORT_TINY_MODEL_H_
