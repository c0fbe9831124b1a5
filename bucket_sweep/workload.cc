#include "brigade/bucket_sweep/workload.h"

#include <limits>
#include <utility>

namespace brigade {
namespace {

// Of the dtype's resolution, per rank: sums of other orders differ by less.
constexpr double kTolerance = 4;

double resolution_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
    case at::kComplexDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return 0x1p-10;
    case at::kBFloat16:
      return 0x1p-7;
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.is_sparse() ? tensor.to_dense() : tensor;
}

}  // namespace

GradientCheck::GradientCheck(std::vector<at::Tensor> parameters,
                             c10::intrusive_ptr<c10d::ProcessGroup> group)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      local_(parameters_.size()) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.push_back(
        parameters_[i].register_hook([this, i](const at::Tensor& gradient) {
          const at::NoGradGuard no_grad;
          at::Tensor copy = dense(gradient.detach()).clone();
          if (local_[i].defined()) copy += local_[i];
          local_[i] = std::move(copy);
        }));
  }
}

GradientCheck::~GradientCheck() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].remove_hook(hooks_[i]);
  }
}

bool GradientCheck::gradients_are_averages() const {
  const at::NoGradGuard no_grad;
  bool right = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    right = is_average(i) && right;
  }
  return right;
}

bool GradientCheck::is_average(size_t parameter) const {
  const at::Tensor& own = local_[parameter];
  const at::Tensor local =
      own.defined() ? own : at::zeros_like(parameters_[parameter]);
  const at::Tensor mean = average(local);
  const at::Tensor size = average(local.abs());
  const at::Tensor& gradient = parameters_[parameter].grad();
  if (!gradient.defined()) return !size.any().item<bool>();
  const at::Tensor bound = size * (kTolerance * group_->getSize() *
                                   resolution_of(mean.scalar_type()));
  return (dense(gradient) - mean).abs().le(bound).all().item<bool>();
}

// Divides first, as the reducer does.
at::Tensor GradientCheck::average(at::Tensor tensor) const {
  std::vector<at::Tensor> sum = {tensor.contiguous().div(group_->getSize())};
  group_->allreduce(sum)->wait();
  return sum[0];
}

}  // namespace brigade
