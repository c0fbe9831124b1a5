#include "brigade/reducer/parameter_table.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/describe_tensor.h"

namespace brigade {
namespace {

constexpr size_t kNamesListed = 5;

std::string quoted_name(const std::vector<std::string>& names, size_t i) {
  return names.empty() ? absl::StrCat(i)
                       : absl::StrCat(i, " ('", names[i], "')");
}

absl::Status check_parameter(const at::Tensor& tensor,
                             absl::FunctionRef<std::string()> name) {
  if (!tensor.defined()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter ", name(), " must be a tensor, it is undefined"));
  }
  if (!tensor.requires_grad()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter ", name(),
        " must require a gradient; leave frozen parameters out of the list"));
  }
  if (!tensor.is_leaf()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter ", name(), " must be a leaf, it is the result of ",
        std::string(tensor.grad_fn()->name()),
        "; its gradient is not accumulated"));
  }
  if (tensor.layout() != at::kStrided) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", name(), " must be a dense tensor"));
  }
  return absl::OkStatus();
}

absl::Status check_alike(const at::Tensor& first, const at::Tensor& tensor,
                         absl::FunctionRef<std::string()> name) {
  if (tensor.sizes() == first.sizes() && tensor.strides() == first.strides() &&
      tensor.scalar_type() == first.scalar_type()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "parameter ", name(), " must be like that of replica 0, ",
      describe_tensor("", first), "; it is ", describe_tensor("", tensor)));
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

// A dtype, and the device of each replica.
struct Kind {
  at::ScalarType dtype;
  std::vector<at::Device> devices;
};

class Kinds {
 public:
  // In order of first appearance.
  int number_of(std::span<const std::vector<at::Tensor>> replicas, size_t i) {
    const auto is_kind = [&](const Kind& kind) {
      return replicas.front()[i].scalar_type() == kind.dtype &&
             std::ranges::equal(
                 kind.devices, replicas, {}, {},
                 [i](const auto& replica) { return replica[i].device(); });
    };
    const auto known = std::ranges::find_if(kinds_, is_kind);
    if (known == kinds_.end()) return add(replicas, i);
    return static_cast<int>(known - kinds_.begin());
  }

 private:
  int add(std::span<const std::vector<at::Tensor>> replicas, size_t i) {
    Kind kind = {.dtype = replicas.front()[i].scalar_type(), .devices = {}};
    for (const std::vector<at::Tensor>& replica : replicas) {
      kind.devices.push_back(replica[i].device());
    }
    kinds_.push_back(std::move(kind));
    return static_cast<int>(kinds_.size() - 1);
  }

  std::vector<Kind> kinds_;  // a few
};

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

absl::StatusOr<ParameterTable> ParameterTable::create(
    std::vector<std::vector<at::Tensor>> replicas,
    std::vector<std::string> names, std::vector<bool> expect_sparse) {
  if (replicas.empty() || replicas.front().empty()) {
    return absl::InvalidArgumentError(
        "a reducer needs at least 1 parameter that requires a gradient, got 0");
  }
  const std::vector<at::Tensor>& parameters = replicas.front();
  if (!names.empty() && names.size() != parameters.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter_names must have one entry for each of ",
                     parameters.size(), " parameters, got ", names.size()));
  }
  if (!expect_sparse.empty() && expect_sparse.size() != parameters.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expect_sparse_gradients must have one entry for each of ",
        parameters.size(), " parameters, got ", expect_sparse.size()));
  }
  const auto name_in = [&](size_t replica, size_t i) {
    std::string name = quoted_name(names, i);
    if (replicas.size() > 1) absl::StrAppend(&name, " of replica ", replica);
    return name;
  };
  absl::flat_hash_map<const c10::TensorImpl*, VariableIndex> seen;
  seen.reserve(replicas.size() * parameters.size());
  for (size_t r = 0; r < replicas.size(); ++r) {
    if (replicas[r].size() != parameters.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "replica ", r, " must have the ", parameters.size(),
          " parameters of replica 0, it has ", replicas[r].size()));
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto name = [&] { return name_in(r, i); };
      if (absl::Status status = check_parameter(replicas[r][i], name);
          !status.ok()) {
        return status;
      }
      if (absl::Status status =
              check_alike(parameters[i], replicas[r][i], name);
          !status.ok()) {
        return status;
      }
      const auto [it, is_new] =
          seen.emplace(replicas[r][i].unsafeGetTensorImpl(),
                       VariableIndex{.replica = r, .parameter = i});
      if (!is_new) {
        return absl::InvalidArgumentError(absl::StrCat(
            "parameter ", name(), " is the same tensor as parameter ",
            name_in(it->second.replica, it->second.parameter),
            "; list it once"));
      }
    }
  }
  return ParameterTable(std::move(replicas), std::move(names),
                        std::move(expect_sparse));
}

ParameterTable::ParameterTable(std::vector<std::vector<at::Tensor>> replicas,
                               std::vector<std::string> names,
                               std::vector<bool> expect_sparse)
    : replicas_(std::move(replicas)), names_(std::move(names)) {
  Kinds kinds;
  specs_.reserve(size());
  adopt_strides();
  shapes_.reserve(size());
  dtypes_.reserve(size());
  for (size_t i = 0; i < size(); ++i) {
    const at::Tensor& tensor = tensors()[i];
    shapes_.add(tensor.sizes());
    dtypes_.push_back(tensor.scalar_type());

    specs_.push_back({.size_bytes = tensor.numel() * tensor.element_size(),
                      .kind = kinds.number_of(replicas_, i),
                      .sparse = !expect_sparse.empty() && expect_sparse[i]});
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

std::optional<VariableIndex> ParameterTable::first_restrided() const {
  return first_variable(*this, [this](VariableIndex v) {
    return differ((*this)[v].strides(), strides_[v.parameter]);
  });
}

std::optional<VariableIndex> ParameterTable::first_unlike_replica_0() const {
  return first_variable(*this, [this](VariableIndex v) {
    return (*this)[v].strides() != tensors()[v.parameter].strides();
  });
}

void ParameterTable::adopt_strides() {
  strides_.clear();
  strides_.reserve(size());
  for (const at::Tensor& tensor : tensors()) {
    strides_.add(tensor.strides());
  }
}

std::string ParameterTable::describe_resized(VariableIndex variable) const {
  return absl::StrCat(name_of(variable.parameter), " had shape [",
                      absl::StrJoin(shapes_[variable.parameter], ", "),
                      "] when the reducer was made, it has [",
                      absl::StrJoin((*this)[variable].sizes(), ", "), "]");
}

std::string ParameterTable::name_of(size_t i) const {
  return absl::StrCat("parameter ", quoted_name(names_, i));
}

std::string ParameterTable::name_of(std::span<const size_t> parameters) const {
  std::vector<std::string> listed;
  for (size_t k = 0; k < std::min(parameters.size(), kNamesListed); ++k) {
    listed.push_back(quoted_name(names_, parameters[k]));
  }
  std::string text =
      absl::StrCat(parameters.size() == 1 ? "parameter " : "parameters ",
                   absl::StrJoin(listed, ", "));
  if (parameters.size() > kNamesListed) {
    absl::StrAppend(&text, " and ", parameters.size() - kNamesListed, " more");
  }
  return text;
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
