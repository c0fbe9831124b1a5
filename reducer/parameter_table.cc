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
                    " must be a tensor, found an undefined one");
  TORCH_CHECK_VALUE(
      tensor.requires_grad(), "parameter ", name(),
      " must require a gradient.\nLeave frozen parameters out of the list.");
  TORCH_CHECK_VALUE(tensor.is_leaf(), "parameter ", name(),
                    " must be a leaf tensor, found the result of ",
                    tensor.grad_fn()->name(),
                    ".\nPass the leaf: autograd accumulates no gradient in "
                    "other tensors.");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "parameter ", name(),
                    " must be a dense tensor, found layout ", tensor.layout());
}

// A loop takes a third of the instructions of a memory comparison, since
// dimensions are few.
bool differ(at::IntArrayRef a, at::IntArrayRef b) {
  if (a.size() != b.size()) return true;
  for (size_t d = 0; d < a.size(); ++d) {
    if (a[d] != b[d]) return true;
  }
  return false;
}

void check_matches_replica_0(const at::Tensor& first, const at::Tensor& tensor,
                             absl::FunctionRef<std::string()> name) {
  TORCH_CHECK_VALUE(!differ(tensor.sizes(), first.sizes()) &&
                        !differ(tensor.strides(), first.strides()) &&
                        tensor.scalar_type() == first.scalar_type(),
                    "parameter ", name(), " must match that of replica 0, ",
                    describe_tensor("", first), "; found ",
                    describe_tensor("", tensor));
}

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

using Names = std::vector<std::string>;
using Tensors = absl::flat_hash_set<const c10::TensorImpl*>;

const c10::TensorImpl* key_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl();
}

void insert(const std::vector<RegisteredParameter>& parameters,
            Tensors& tensors) {
  for (const auto& each : parameters) tensors.insert(key_of(each.tensor));
}

struct Changes {
  Names added;
  Names replaced;
  Names removed;
  Names unfrozen;
};

Changes changes_of(const WrappedParameters& wrapped,
                   std::span<const RegisteredParameter> present) {
  Tensors known;
  insert(wrapped.reduced, known);
  insert(wrapped.frozen, known);
  for (const at::Tensor& other : wrapped.others) known.insert(key_of(other));
  absl::flat_hash_set<std::string_view> reduced_names;
  for (const auto& each : wrapped.reduced) reduced_names.insert(each.name);
  const absl::flat_hash_set<std::string_view> ignored(wrapped.ignored.begin(),
                                                      wrapped.ignored.end());
  Changes changes;
  Tensors present_tensors;
  absl::flat_hash_set<std::string_view> present_names;
  for (const auto& [name, tensor, stands_in] : present) {
    present_tensors.insert(key_of(tensor));
    present_names.insert(name);
    if (stands_in || !tensor.requires_grad()) continue;
    if (known.contains(key_of(tensor)) || ignored.contains(name)) continue;
    (reduced_names.contains(name) ? changes.replaced : changes.added)
        .push_back(name);
  }
  for (const auto& each : wrapped.reduced) {
    if (!present_tensors.contains(key_of(each.tensor)) &&
        !present_names.contains(each.name)) {
      changes.removed.push_back(each.name);
    }
  }
  for (const auto& each : wrapped.frozen) {
    if (each.tensor.requires_grad()) changes.unfrozen.push_back(each.name);
  }
  return changes;
}

std::string quoted(const Names& names) {
  return shortened_list(
      names.size(), [&](size_t i) { return absl::StrCat("'", names[i], "'"); });
}

}  // namespace

// One pass over the tensors, since thousands of them do not stay in the cache.
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
  // By parameter, then by replica.
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
      if (r > 0) check_matches_replica_0(tensors()[i], tensor, name);
      if (!seen.insert(tensor.unsafeGetTensorImpl()).second) {
        const auto first = first_variable(*this, [&](VariableIndex variable) {
          return (*this)[variable].is_same(tensor);
        });
        TORCH_CHECK_VALUE(false, "parameter ", name(),
                          " is the same tensor as parameter ",
                          name_with_replica(*first), ".\nList it once.");
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
  std::vector<size_t> first_of_kind;
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
        quoted_name(names_, i), ": ", describe_tensor("", tensors()[i]),
        ", kind ", specs_[i].kind,
        specs_[i].sparse ? ", sparse gradient" : ""));
  }
  return descriptions;
}

bool check_parameters(std::string_view module_name,
                      const WrappedParameters& wrapped,
                      std::span<const RegisteredParameter> present) {
  const Changes changes = changes_of(wrapped, present);
  std::vector<std::string> found;
  const auto add = [&](const char* change, const Names& names) {
    if (!names.empty()) {
      found.push_back(absl::StrCat(change, ": ", quoted(names)));
    }
  };
  add("added", changes.added);
  add("replaced", changes.replaced);
  add("removed", changes.removed);
  add("unfrozen", changes.unfrozen);
  const bool only_added = found.size() == 1 && !changes.added.empty();
  TORCH_CHECK(found.empty(), "DistributedDataParallel: the parameters of ",
              module_name, " have changed since it was wrapped; ",
              absl::StrJoin(found, "; "),
              ". Their gradients would not be averaged.\n"
              "Change the module before you wrap it.",
              only_added ? " If its forward creates parameters lazily, run one "
                           "forward on every rank before you wrap it."
                         : "");
  return std::ranges::none_of(present, &RegisteredParameter::stands_in);
}

}  // namespace brigade
