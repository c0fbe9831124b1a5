#include "brigade/reducer/parameter_table.h"

#include <ATen/core/DimVector.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {
namespace {

std::string quoted_name(const std::vector<std::string>& names, size_t i) {
  return names.empty() ? absl::StrCat(i)
                       : absl::StrCat(i, " ('", names[i], "')");
}

void check_parameter(const at::Tensor& tensor,
                     absl::FunctionRef<std::string()> name) {
  TORCH_CHECK_VALUE(tensor.defined(), "parameter ", name(),
                    " must be a tensor, it is undefined");
  TORCH_CHECK_VALUE(
      tensor.requires_grad(), "parameter ", name(),
      " must require a gradient; leave frozen parameters out of the list");
  TORCH_CHECK_VALUE(tensor.is_leaf(), "parameter ", name(),
                    " must be a leaf, it is the result of ",
                    tensor.grad_fn()->name(),
                    "; its gradient is not accumulated");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "parameter ", name(),
                    " must be a dense tensor");
}

// Dimensions are few: a loop takes a third of the instructions that comparing
// memory does.
bool differ(at::IntArrayRef a, at::IntArrayRef b) {
  if (a.size() != b.size()) return true;
  for (size_t d = 0; d < a.size(); ++d) {
    if (a[d] != b[d]) return true;
  }
  return false;
}

void check_alike(const at::Tensor& first, const at::Tensor& tensor,
                 absl::FunctionRef<std::string()> name) {
  TORCH_CHECK_VALUE(!differ(tensor.sizes(), first.sizes()) &&
                        !differ(tensor.strides(), first.strides()) &&
                        tensor.scalar_type() == first.scalar_type(),
                    "parameter ", name(), " must be like that of replica 0, ",
                    describe_tensor("", first), "; it is ",
                    describe_tensor("", tensor));
}

// Replica by replica; nullopt if there is none.
template <typename Predicate>
std::optional<VariableIndex> first_variable(const ParameterTable& table,
                                            const Predicate& holds) {
  for (size_t r = 0; r < table.num_replicas(); ++r) {
    for (size_t i = 0; i < table.size(); ++i) {
      const VariableIndex variable = {.replica = r, .parameter = i};
      if (holds(variable)) return variable;
    }
  }
  return std::nullopt;
}

}  // namespace

// Thousands of tensors don't stay in a cache: all that is asked of one is asked
// at once.
ParameterTable::ParameterTable(std::vector<std::vector<at::Tensor>> replicas,
                               std::vector<std::string> names,
                               const std::vector<bool>& expect_sparse)
    : replicas_(std::move(replicas)), names_(std::move(names)) {
  TORCH_CHECK_VALUE(
      !replicas_.empty() && !replicas_.front().empty(),
      "a reducer needs at least 1 parameter that requires a gradient, got 0");
  TORCH_CHECK_VALUE(names_.empty() || names_.size() == size(),
                    "parameter_names must have one entry for each of ", size(),
                    " parameters, got ", names_.size());
  TORCH_CHECK_VALUE(expect_sparse.empty() || expect_sparse.size() == size(),
                    "expect_sparse_gradients must have one entry for each of ",
                    size(), " parameters, got ", expect_sparse.size());
  dtypes_.reserve(size());
  specs_.reserve(size());
  shapes_.reserve(size());
  gradient_strides_.reserve(size());
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  seen.reserve(num_variables());
  // Of a parameter's variables, side by side.
  std::vector<at::Device> devices(num_variables(), at::kCPU);
  at::DimVector room;
  for (size_t r = 0; r < num_replicas(); ++r) {
    const std::vector<at::Tensor>& replica = replicas_[r];
    TORCH_CHECK_VALUE(replica.size() == size(), "replica ", r,
                      " must have the ", size(),
                      " parameters of replica 0, it has ", replica.size());
    for (size_t i = 0; i < size(); ++i) {
      const at::Tensor& tensor = replica[i];
      const auto name = [&] {
        return name_with_replica({.replica = r, .parameter = i});
      };
      check_parameter(tensor, name);
      if (r > 0) check_alike(tensors()[i], tensor, name);
      if (!seen.insert(tensor.unsafeGetTensorImpl()).second) {
        const auto first = first_variable(*this, [&](VariableIndex variable) {
          return (*this)[variable].is_same(tensor);
        });
        TORCH_CHECK_VALUE(false, "parameter ", name(),
                          " is the same tensor as parameter ",
                          name_with_replica(*first), "; list it once");
      }
      devices[i * num_replicas() + r] = tensor.device();
      if (r > 0) continue;
      shapes_.add(tensor.sizes());
      gradient_strides_.add(brigade::gradient_strides(tensor, room));
      dtypes_.push_back(tensor.scalar_type());
      specs_.push_back({.size_bytes = static_cast<int64_t>(tensor.nbytes()),
                        .sparse = !expect_sparse.empty() && expect_sparse[i]});
    }
  }
  const auto devices_of = [&](size_t i) {
    return std::span(devices).subspan(i * num_replicas(), num_replicas());
  };
  std::vector<size_t> first_of_kind;  // a few
  for (size_t i = 0; i < size(); ++i) {
    const auto known = std::ranges::find_if(first_of_kind, [&](size_t k) {
      return dtypes_[k] == dtypes_[i] &&
             std::ranges::equal(devices_of(k), devices_of(i));
    });
    specs_[i].kind = static_cast<int>(known - first_of_kind.begin());
    if (known == first_of_kind.end()) first_of_kind.push_back(i);
  }
}

std::vector<size_t> ParameterTable::parameters_of(
    std::span<const size_t> variables) const {
  std::vector<size_t> parameters;
  for (const size_t number : variables) {
    parameters.push_back(variable(number).parameter);
  }
  std::ranges::sort(parameters);
  const auto repeated = std::ranges::unique(parameters);
  parameters.erase(repeated.begin(), repeated.end());
  return parameters;
}

std::optional<VariableIndex> ParameterTable::first_resized() const {
  return first_variable(*this, [this](VariableIndex v) {
    return differ((*this)[v].sizes(), shapes_[v.parameter]);
  });
}

std::string ParameterTable::describe_resized(VariableIndex variable) const {
  return absl::StrCat(name_of(variable.parameter), " had shape [",
                      absl::StrJoin(shapes_[variable.parameter], ", "),
                      "] when the reducer was made, it has [",
                      absl::StrJoin((*this)[variable].sizes(), ", "), "]");
}

// "3 ('head.bias') of replica 1".
std::string ParameterTable::name_with_replica(VariableIndex variable) const {
  std::string name = quoted_name(names_, variable.parameter);
  if (num_replicas() > 1) {
    absl::StrAppend(&name, " of replica ", variable.replica);
  }
  return name;
}

std::string ParameterTable::name_of(size_t i) const {
  return absl::StrCat("parameter ", quoted_name(names_, i));
}

std::string ParameterTable::name_of(std::span<const size_t> parameters) const {
  return absl::StrCat(parameters.size() == 1 ? "parameter " : "parameters ",
                      shortened_list(parameters.size(), [&](size_t k) {
                        return quoted_name(names_, parameters[k]);
                      }));
}

std::vector<std::string> ParameterTable::describe_all() const {
  std::vector<std::string> descriptions;
  descriptions.reserve(size());
  for (size_t i = 0; i < size(); ++i) {
    descriptions.push_back(absl::StrCat(
        describe_tensor(names_.empty() ? "" : names_[i], tensors()[i]),
        ", kind ", specs_[i].kind,
        specs_[i].sparse ? ", sparse gradient" : ""));
  }
  return descriptions;
}

}  // namespace brigade
