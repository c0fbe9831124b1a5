#include "brigade/reducer/parameter_changes.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/errors/error_texts.h"

namespace brigade {
namespace {

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

bool check_parameters(std::string_view module_name,
                      const WrappedParameters& wrapped,
                      std::span<const RegisteredParameter> present) {
  const Changes changes = changes_of(wrapped, present);
  Names told;
  const auto tell = [&](const char* change, const Names& names) {
    if (!names.empty()) {
      told.push_back(absl::StrCat(change, ": ", quoted(names)));
    }
  };
  tell("added", changes.added);
  tell("replaced", changes.replaced);
  tell("removed", changes.removed);
  tell("unfrozen", changes.unfrozen);
  const bool only_added = told.size() == 1 && !changes.added.empty();
  TORCH_CHECK(told.empty(), "DistributedDataParallel: expected the parameters ",
              "that ", module_name, " had when it was wrapped, found some ",
              absl::StrJoin(told, "; "),
              ". Nobody would average their "
              "gradients.\nChange the module first, then wrap it.",
              only_added ? " If its forward builds submodules lazily, run one "
                           "forward before wrapping it, on every rank alike."
                         : "");
  return std::ranges::none_of(present, &RegisteredParameter::stands_in);
}

}  // namespace brigade
