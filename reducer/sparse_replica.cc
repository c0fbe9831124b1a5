#include "brigade/reducer/sparse_replica.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace brigade {

SparseReplica::SparseReplica(const ParameterTable& table, size_t parameter)
    : table_(table), parameter_(parameter) {}

int64_t SparseReplica::pack(double scale) {
  const at::NoGradGuard no_grad;
  const at::Tensor& gradient = table_[parameter_].mutable_grad();
  if (!gradient.defined()) {
    buffer_ = zeros();
    return 0;
  }
  TORCH_CHECK(gradient.layout() == at::kSparse, "the gradient of ",
              table_.name_of(parameter_), " must be sparse COO, it is ",
              gradient.layout(),
              ".\nClear its flag in ReducerOptions::expect_sparse_gradients.");
  buffer_ = at::mul(gradient, scale);
  return static_cast<int64_t>(buffer_._values().nbytes());
}

int64_t SparseReplica::deliver(const at::Tensor& result) {
  const at::NoGradGuard no_grad;
  const at::Tensor& parameter = table_[parameter_];
  TORCH_CHECK(result.sizes() == parameter.sizes(),
              "the comm hook must return a gradient of size ",
              parameter.sizes(), " for ", table_.name_of(parameter_),
              ", it returned ", result.sizes(),
              ".\nReturn the reduced bucket.");
  parameter.mutable_grad() = result.to(parameter.scalar_type());
  return 0;
}

at::Tensor SparseReplica::zeros() const {
  const at::Tensor& parameter = table_[parameter_];
  return at::zeros(
      parameter.sizes(),
      parameter.options().layout(at::kSparse).requires_grad(false));
}

}  // namespace brigade
