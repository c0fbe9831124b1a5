#include "brigade/benchmarks/reducer_cost/tiny_model.h"

namespace brigade::benchmarks {
namespace {

constexpr int64_t kNumel = 4;

}  // namespace

TinyModel::TinyModel(int64_t num_parameters)
    : input_(at::ones({kNumel}, at::kFloat)) {
  for (int64_t i = 0; i < num_parameters; ++i) {
    parameters_.push_back(at::ones({kNumel}, at::kFloat).requires_grad_());
  }
}

int64_t TinyModel::gradient_bytes() const {
  return static_cast<int64_t>(parameters_.size() * parameters_[0].nbytes());
}

void TinyModel::clear_gradients() {
  for (const at::Tensor& parameter : parameters_) {
    parameter.mutable_grad().reset();
  }
}

at::Tensor TinyModel::forward() const {
  at::Tensor x = input_;
  for (const at::Tensor& parameter : parameters_) {
    x = at::addcmul(x, parameter, input_);
  }
  return x.sum();
}

}  // namespace brigade::benchmarks
