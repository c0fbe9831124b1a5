// Table of a reducer's parameters, and the check that a wrapped module still
// has them.
//
// Local replicas hold the same parameters in different tensors; a variable is
// one such tensor. Variables are numbered replica by replica.
//
// Thread safety: a table is immutable; any thread may read it.

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
#include <string_view>
#include <vector>

#include "brigade/planning/bucket_plan.h"

namespace brigade {

// Shapes or strides of many tensors in one array. Most tensors have one or two
// dimensions, so an allocation or inline buffer for each would cost more.
class DimsList {
 public:
  void reserve(size_t num_tensors) {
    ends_.reserve(num_tensors);
    dims_.reserve(2 * num_tensors);
  }

  void add(c10::IntArrayRef dims) {
    // Faster than insert(), since dimensions are few.
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
  // `replicas[r]` lists the parameters of local replica r. `names` is empty or
  // has one entry per parameter. An empty `expect_sparse` means all dense.
  //
  // Errors: ValueError that names the parameter, if
  //   - there is no parameter;
  //   - a parameter is undefined, without requires_grad, not a leaf, not dense,
  //     or listed twice;
  //   - `names` or `expect_sparse` has another length;
  //   - replicas differ in the number, shape, strides or dtype of parameters.
  ParameterTable(std::vector<std::vector<at::Tensor>> replicas,
                 std::vector<std::string> names,
                 const std::vector<bool>& expect_sparse);

  const std::vector<std::vector<at::Tensor>>& replicas() const {
    return replicas_;
  }
  size_t num_replicas() const { return replicas_.size(); }

  // The parameters of replica 0.
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

  // Returns the parameters of `variables`, each once, ascending.
  std::vector<size_t> parameters_of(std::span<const size_t> variables) const;

  // May be empty.
  const std::vector<std::string>& names() const { return names_; }

  bool is_sparse(size_t i) const { return specs_[i].sparse; }

  // The dtype at construction. The tensor's own may differ later: a caller may
  // assign `data` of lower precision for a forward.
  at::ScalarType dtype(size_t i) const { return dtypes_[i]; }

  // At construction; comm_hooks/hook_traits.h defines gradient strides.
  at::IntArrayRef shape(size_t i) const { return shapes_[i]; }
  at::IntArrayRef gradient_strides(size_t i) const {
    return gradient_strides_[i];
  }
  int64_t numel(size_t i) const { return c10::multiply_integers(shape(i)); }

  // Input of the planner. Kinds number the pairs (dtype, devices of the
  // replicas) by first appearance.
  std::span<const ParameterSpec> specs() const { return specs_; }

  // Returns the first variable whose shape has changed since construction.
  std::optional<VariableIndex> first_resized() const;
  std::string describe_resized(VariableIndex variable) const;

  // "parameter 3 ('head.bias')", or "parameter 3" if it has no name.
  std::string name_of(size_t i) const;

  // "parameters 3 ('head.bias'), 4 ('head.weight') and 7 more"; names at most
  // five.
  std::string name_of(std::span<const size_t> parameters) const;

  std::string name_of_variables(std::span<const size_t> variables) const {
    return name_of(parameters_of(variables));
  }

  // "'head.bias' Float [10] strides [1] on cpu, kind 0" for each parameter.
  // Equal on two ranks iff their parameters match and may share buckets.
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

struct RegisteredParameter {
  std::string name;
  at::Tensor tensor;
  // Replaces the parameter during one torch.func.functional_call().
  bool stands_in = false;
};

// The parameters of a module when it was wrapped.
struct WrappedParameters {
  std::vector<RegisteredParameter> reduced;
  std::vector<RegisteredParameter> frozen;  // must stay frozen
  std::vector<at::Tensor> others;           // allowed, not reduced
  std::vector<std::string> ignored;         // names
};

// Checks that a module's parameters are those that were wrapped. `present`
// lists the module's parameters now, each tensor once. Returns false if one of
// them stands in, so that the parameters will change again. Shapes, dtypes and
// devices are checked by the reducer.
//
// Errors: RuntimeError that names the parameters that require gradients and
// were added, replaced, removed or unfrozen.
bool check_parameters(std::string_view module_name,
                      const WrappedParameters& wrapped,
                      std::span<const RegisteredParameter> present);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PARAMETER_TABLE_H_
