// The parameters of a reducer: checked once, never changed.
//
// Thread safety: immutable after create(); any thread may read.

#ifndef BRIGADE_REDUCER_PARAMETER_TABLE_H_
#define BRIGADE_REDUCER_PARAMETER_TABLE_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "brigade/planning/plan_by_size.h"

namespace brigade {

class ParameterTable {
 public:
  // Empty `names` and `expect_sparse` stand for no names and all dense.
  //
  // Errors (InvalidArgument, naming the parameter):
  //   no parameters; one that is undefined, without requires_grad, not a leaf,
  //   sparse itself, or listed twice; names or sparse flags of another length.
  static absl::StatusOr<ParameterTable> create(
      std::vector<at::Tensor> parameters, std::vector<std::string> names,
      std::vector<bool> expect_sparse);

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  const at::Tensor& operator[](size_t i) const { return tensors_[i]; }
  size_t size() const { return tensors_.size(); }
  bool is_sparse(size_t i) const { return specs_[i].sparse; }

  // What the planner sees. Kinds number the (dtype, device) pairs in order of
  // first appearance.
  std::span<const ParameterSpec> specs() const { return specs_; }

  // "parameter 3 ('head.bias')", or "parameter 3" if it has no name.
  std::string name_of(size_t i) const;

  // "parameters 3 ('head.bias'), 4 ('head.weight') and 7 more": five at most.
  std::string name_of(std::span<const size_t> parameters) const;

  // "'head.bias' Float [10] strides [1] on cpu, kind 0": equal on two ranks iff
  // the parameters fit each other and share buckets alike.
  std::vector<std::string> describe_all() const;

 private:
  ParameterTable(std::vector<at::Tensor> tensors,
                 std::vector<std::string> names,
                 std::vector<bool> expect_sparse);

  std::vector<at::Tensor> tensors_;
  std::vector<std::string> names_;  // empty or one per parameter
  std::vector<ParameterSpec> specs_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PARAMETER_TABLE_H_
