// The parameters of a reducer: checked at construction, never changed.
//
// Local replicas hold the same parameters in other tensors; a variable is one
// such tensor. Variables are numbered replica by replica.
//
// Thread safety: immutable; any thread may read.

#ifndef BRIGADE_REDUCER_PARAMETER_TABLE_H_
#define BRIGADE_REDUCER_PARAMETER_TABLE_H_

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/accumulate.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "brigade/planning/bucket_plan.h"

namespace brigade {

// Shapes or strides of many tensors, without an allocation or an inline buffer
// for each: most have one dimension or two.
class DimsList {
 public:
  void reserve(size_t num_tensors) {
    ends_.reserve(num_tensors);
    dims_.reserve(2 * num_tensors);
  }

  void add(c10::IntArrayRef dims) {
    // One by one: dimensions are few, and a call for each tensor costs more.
    for (const int64_t dim : dims) dims_.push_back(dim);
    ends_.push_back(dims_.size());
  }

  // Valid until the next add().
  c10::IntArrayRef operator[](size_t i) const {
    const size_t begin = i == 0 ? 0 : ends_[i - 1];
    return {dims_.data() + begin, ends_[i] - begin};
  }

 private:
  std::vector<int64_t> dims_;
  std::vector<size_t> ends_;
};

class ParameterTable {
 public:
  // Empty `names` and `expect_sparse` stand for no names and all dense.
  //
  // `replicas[r]` lists the parameters of local replica r.
  //
  // Errors (ValueError, naming the parameter):
  //   no parameters; one that is undefined, without requires_grad, not a leaf,
  //   sparse itself, or listed twice; names or sparse flags of another length;
  //   replicas that differ in number, shape, strides or dtype.
  ParameterTable(std::vector<std::vector<at::Tensor>> replicas,
                 std::vector<std::string> names,
                 const std::vector<bool>& expect_sparse);

  const std::vector<std::vector<at::Tensor>>& replicas() const {
    return replicas_;
  }
  size_t num_replicas() const { return replicas_.size(); }

  // Replica 0 stands for all where they are equal.
  const std::vector<at::Tensor>& tensors() const { return replicas_.front(); }
  const at::Tensor& operator[](size_t i) const { return tensors()[i]; }
  const at::Tensor& operator[](VariableIndex variable) const {
    return replicas_[variable.replica][variable.parameter];
  }
  size_t size() const { return tensors().size(); }

  size_t num_variables() const { return num_replicas() * size(); }
  size_t number_of(VariableIndex variable) const {
    return variable.replica * size() + variable.parameter;
  }
  VariableIndex variable(size_t number) const {
    return {.replica = number / size(), .parameter = number % size()};
  }

  // Of variables, ascending; each parameter once, ascending.
  std::vector<size_t> parameters_of(std::span<const size_t> variables) const;

  const std::vector<std::string>& names() const {
    return names_;
  }  // maybe none

  bool is_sparse(size_t i) const { return specs_[i].sparse; }

  // As it was at construction. The tensor itself may change its dtype later,
  // where a caller swaps its data for a forward in lower precision.
  at::ScalarType dtype(size_t i) const { return dtypes_[i]; }

  // As they were at construction.
  at::IntArrayRef shape(size_t i) const { return shapes_[i]; }
  // See comm_hooks/hook_traits.h.
  at::IntArrayRef gradient_strides(size_t i) const {
    return gradient_strides_[i];
  }
  int64_t numel(size_t i) const { return c10::multiply_integers(shape(i)); }

  // For the planner. Kinds number the (dtype, devices of the replicas)
  // pairs in order of first appearance.
  std::span<const ParameterSpec> specs() const { return specs_; }

  // The first parameter whose shape is another one than at construction.
  std::optional<VariableIndex> first_resized() const;
  std::string describe_resized(VariableIndex variable) const;

  // "parameter 3 ('head.bias')", or "parameter 3" if it has no name.
  std::string name_of(size_t i) const;

  // "parameters 3 ('head.bias'), 4 ('head.weight') and 7 more": five at most.
  std::string name_of(std::span<const size_t> parameters) const;

  std::string name_of_variables(std::span<const size_t> variables) const {
    return name_of(parameters_of(variables));
  }

  // "'head.bias' Float [10] strides [1] on cpu, kind 0": equal on two ranks iff
  // the parameters fit each other and may share the same buckets.
  std::vector<std::string> describe_all() const;

 private:
  std::string name_with_replica(VariableIndex variable) const;

  std::vector<std::vector<at::Tensor>> replicas_;
  std::vector<std::string> names_;  // empty or one per parameter
  std::vector<at::ScalarType> dtypes_;
  std::vector<ParameterSpec> specs_;
  DimsList shapes_;
  DimsList gradient_strides_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PARAMETER_TABLE_H_
