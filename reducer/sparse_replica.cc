#include "brigade/reducer/sparse_replica.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <vector>

namespace brigade {

SparseReplica::SparseReplica(const ParameterTable& table,
                             VariableIndex variable)
    : table_(table), variable_(variable) {}

int64_t SparseReplica::pack(double scale,
                            std::span<const size_t> /*unused_slots*/) {
  const at::NoGradGuard no_grad;
  const at::Tensor& gradient = table_[variable_].mutable_grad();
  if (!gradient.defined()) {
    buffer_ = zeros();
    return 0;
  }
  TORCH_CHECK(gradient.layout() == at::kSparse, "the gradient of ",
              table_.name_of(variable_.parameter),
              " must be sparse COO, it is ", gradient.layout(),
              ".\nClear its flag in ReducerOptions::expect_sparse_gradients.");
  sparse_dim_ = gradient.sparse_dim();
  buffer_ = at::mul(gradient, scale);
  return static_cast<int64_t>(buffer_._values().nbytes());
}

void SparseReplica::check_result(const at::Tensor& result) const {
  const at::Tensor& parameter = table_[variable_];
  TORCH_CHECK(result.sizes() == parameter.sizes(),
              "the comm hook must return a gradient of size ",
              parameter.sizes(), " for ", table_.name_of(variable_.parameter),
              ", it returned ", result.sizes(),
              ".\nReturn the reduced bucket.");
}

int64_t SparseReplica::deliver(const at::Tensor& result,
                               std::span<const size_t> globally_unused_slots) {
  if (!globally_unused_slots.empty()) return 0;
  const at::NoGradGuard no_grad;
  const at::Tensor& parameter = table_[variable_];
  parameter.mutable_grad() = result.to(parameter.scalar_type());
  return 0;
}

void SparseReplica::record_stream(c10::Stream stream) const {
  const at::Tensor& gradient = table_[variable_].grad();
  if (gradient.defined()) gradient.record_stream(stream);
}

void SparseReplica::add(const at::Tensor& buffer) {
  const at::NoGradGuard no_grad;
  buffer_ = at::add(buffer_, buffer.to(buffer_.device()));
}

at::Tensor SparseReplica::zeros() const {
  const at::Tensor& parameter = table_[variable_];
  std::vector<int64_t> values_sizes = {0};
  for (int64_t d = sparse_dim_; d < parameter.dim(); ++d) {
    values_sizes.push_back(parameter.size(d));
  }
  const at::TensorOptions options = parameter.options().requires_grad(false);
  return at::sparse_coo_tensor(
      at::empty({sparse_dim_, 0}, options.dtype(at::kLong)),
      at::empty(values_sizes, options), parameter.sizes());
}

}  // namespace brigade
