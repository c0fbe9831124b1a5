#include "brigade/fsdp/fully_shard.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/process_group.h"
#include "brigade/fsdp/segmented_model.h"
#include "brigade/fsdp/sharded_unit.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// One module of a depth-first traversal; parents precede children.
struct TreeNode {
  std::string name;
  std::string type = {};
  std::optional<size_t> parent = std::nullopt;
  const torch::nn::Module* module = nullptr;
  std::vector<UnitParameter> parameters = {};  // its own, sharded
  std::vector<UnitParameter> ignored = {};
  std::vector<UnitParameter> buffers = {};
};

using Tree = std::vector<TreeNode>;

std::string joined(const std::string& outer, const std::string& inner) {
  return outer.empty() ? inner : absl::StrCat(outer, ".", inner);
}

template <typename Item>
auto named(const Item& item) {
  if constexpr (requires { item.key(); })
    return std::pair(item.key(), item.value());
  else
    return std::pair(item.name, item.value);
}

template <typename List>
std::vector<UnitParameter> tensors_of(const List& list,
                                      const std::string& module) {
  std::vector<UnitParameter> tensors;
  for (const auto& item : list) {
    const auto [key, tensor] = named(item);
    tensors.push_back({.name = joined(module, key), .tensor = tensor});
  }
  return tensors;
}

template <typename Module>
void add_to(Tree& tree, const Module& module, const std::string& name = "",
            std::optional<size_t> parent = std::nullopt) {
  const size_t index = tree.size();
  tree.push_back(
      {.name = name,
       .parent = parent,
       .parameters = tensors_of(module.named_parameters(false), name),
       .buffers = tensors_of(module.named_buffers(false), name)});
  if constexpr (std::is_same_v<Module, torch::nn::Module>) {
    tree.back().type = module.name();
    tree.back().module = &module;
  } else {
    tree.back().type = module.type()->name()->qualifiedName();
  }
  for (const auto& item : module.named_children()) {
    const auto [key, child] = named(item);
    if constexpr (requires { *child; }) {
      add_to(tree, *child, joined(name, key), index);
    } else {
      add_to(tree, child, joined(name, key), index);
    }
  }
}

bool is_module_list(const TreeNode& node) {
  const auto is_named = [&](std::string_view name) {
    return node.type.find(name) != std::string::npos;
  };
  return is_named("Sequential") || is_named("ModuleList");
}

// Returns a flag per node.
std::vector<char> choose_units(const Tree& tree,
                               const UnitSelection& selection) {
  std::vector<char> is_unit(tree.size(), 0);
  // Returns true if there is any.
  const auto choose = [&](const auto& is_chosen) {
    std::vector<int64_t> numel(tree.size(), 0);
    for (size_t i = tree.size(); i-- > 1;) {  // children before parents
      for (const UnitParameter& parameter : tree[i].parameters) {
        numel[i] += parameter.tensor.numel();
      }
      is_unit[i] = numel[i] > 0 && is_chosen(tree[i], numel[i]) ? 1 : 0;
      if (is_unit[i] == 0) numel[*tree[i].parent] += numel[i];
    }
    return std::ranges::find(is_unit, 1) != is_unit.end();
  };
  if (selection.is_unit) {
    choose([&](const TreeNode& node, int64_t numel) {
      return selection.is_unit({.name = node.name,
                                .type = node.type,
                                .numel = numel,
                                .module = node.module});
    });
  } else if (!choose([&](const TreeNode& node, int64_t) {
               return is_module_list(tree[*node.parent]);
             })) {
    choose([](const TreeNode& node, int64_t) { return *node.parent == 0; });
  }
  return is_unit;
}

// Adds each parameter to its unit. The root gets those that two units share.
void add_parameters(const Tree& tree, const std::vector<size_t>& unit_of,
                    std::vector<UnitRequest>& requests) {
  std::unordered_map<const c10::TensorImpl*, size_t> indices;
  std::vector<std::pair<const UnitParameter*, size_t>> in_order;
  for (size_t i = 0; i < tree.size(); ++i) {
    for (const UnitParameter& parameter : tree[i].parameters) {
      const auto [found, is_new] = indices.emplace(
          parameter.tensor.unsafeGetTensorImpl(), in_order.size());
      if (is_new) {
        in_order.emplace_back(&parameter, unit_of[i]);
      } else if (in_order[found->second].second != unit_of[i]) {
        in_order[found->second].second = 0;
      }
    }
  }
  for (const auto& [parameter, unit] : in_order) {
    requests[unit].parameters.push_back(*parameter);
  }
}

std::vector<UnitRequest> without_empty_units(
    const std::vector<UnitRequest>& requests) {
  std::vector<UnitRequest> kept;
  std::vector<std::optional<size_t>> new_indices(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    std::optional<size_t> parent = requests[i].parent;
    while (parent && !new_indices[*parent]) parent = requests[*parent].parent;
    if (requests[i].parameters.empty()) continue;
    UnitRequest& request = kept.emplace_back(requests[i]);
    request.parent = parent ? new_indices[*parent] : std::nullopt;
    new_indices[i] = kept.size() - 1;
  }
  return kept;
}

// Returns the root unit, then the others in order of registration.
std::vector<UnitRequest> units_of(const Tree& tree,
                                  const UnitSelection& selection) {
  const std::vector<char> is_unit = choose_units(tree, selection);
  std::vector<UnitRequest> requests = {
      {.name = "", .reshard_after_forward = false}};
  std::vector<size_t> unit_of(tree.size(), 0);  // by node
  for (size_t i = 1; i < tree.size(); ++i) {
    unit_of[i] = unit_of[*tree[i].parent];
    if (is_unit[i] == 0) continue;
    UnitRequest request = {.name = tree[i].name, .parent = unit_of[i]};
    if (selection.mesh_of) request.mesh = selection.mesh_of(request.name);
    unit_of[i] = requests.size();
    requests.push_back(std::move(request));
  }
  add_parameters(tree, unit_of, requests);
  return without_empty_units(requests);
}

absl::Status check_no_shared_memory(const Tree& tree,
                                    const std::vector<UnitRequest>& requests) {
  ParameterMemory memory;
  std::unordered_set<const c10::TensorImpl*> sharded;
  for (const UnitRequest& unit : requests) {
    for (const UnitParameter& parameter : unit.parameters) {
      sharded.insert(parameter.tensor.unsafeGetTensorImpl());
      memory.take(parameter.tensor,
                  absl::StrCat("parameter '", parameter.name, "'"));
    }
  }
  absl::Status status;
  const auto check = [&](const std::vector<UnitParameter>& all,
                         const char* kind) {
    for (const UnitParameter& kept : all) {
      if (sharded.contains(kept.tensor.unsafeGetTensorImpl())) continue;
      const std::string* const owner = memory.owner_of(kept.tensor);
      if (owner == nullptr) continue;
      status.Update(absl::InvalidArgumentError(absl::StrCat(
          "fully_shard: ", kind, " '", kept.name, "' shares its memory with ",
          *owner,
          ", which is sharded, and sharding would untie them.\nClone the ",
          kind, " before fully_shard().")));
    }
  };
  for (const TreeNode& node : tree) {
    check(node.ignored, "ignored parameter");
    check(node.buffers, "buffer");
  }
  return status;
}

template <typename Module>
std::function<void()> make_registration_check(const Module& module) {
  std::unordered_set<const c10::TensorImpl*> known;
  for (const at::Tensor& parameter : module.parameters()) {
    known.insert(parameter.unsafeGetTensorImpl());
  }
  return [&module, known = std::move(known)] {
    for (const auto& item : module.named_parameters()) {
      const auto [name, parameter] = named(item);
      TORCH_CHECK(!parameter.requires_grad() ||
                      known.contains(parameter.unsafeGetTensorImpl()),
                  "fully_shard: parameter '", name,
                  "' was registered after sharding, and would differ between "
                  "ranks.\nRegister all parameters before fully_shard().");
    }
  };
}

template <typename Module>
std::unique_ptr<ShardedModel> shard(const Module& module, const Group& group,
                                    FullyShardOptions options,
                                    const UnitSelection& selection) {
  TORCH_CHECK_VALUE(
      group,
      "fully_shard: the process group is null.\nPass the group of "
      "init_process_group().");
  Tree tree;
  add_to(tree, module);
  for (TreeNode& node : tree) {
    std::erase_if(node.parameters, [&](const UnitParameter& parameter) {
      if (!selection.is_ignored ||
          !selection.is_ignored(parameter.name, parameter.tensor)) {
        return false;
      }
      node.ignored.push_back(parameter);
      return true;
    });
  }
  std::vector<UnitRequest> requests = units_of(tree, selection);
  require_agreement(group, "fully_shard: tied tensor", {},
                    check_no_shared_memory(tree, requests));
  auto model = std::make_unique<SegmentedModel>(
      make_sharded_units(std::move(requests), group, options), group, options);
  model->set_forward_check(make_registration_check(module));
  return model;
}

}  // namespace

void shard_optimizer_state(ShardedModel& model) {
  for (size_t unit = 0; unit < model.unit_names().size(); ++unit) {
    model.settings(unit).reshard_after_forward = false;
    model.settings(unit).reshard_after_backward = false;
  }
  model.set_max_reducing(std::numeric_limits<size_t>::max());
}

FullyShardOptions hybrid_shard(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options) {
  if (!options.num_shards) options.num_shards = ranks_of_a_host(group);
  return options;
}

UnitSelection units_of_size(int64_t numel) {
  return {.is_unit = [numel](const UnitCandidate& candidate) {
    return candidate.numel >= numel;
  }};
}

std::unique_ptr<ShardedModel> fully_shard(const torch::nn::Module& module,
                                          const Group& group,
                                          FullyShardOptions options,
                                          const UnitSelection& selection) {
  return shard(module, group, std::move(options), selection);
}

std::unique_ptr<ShardedModel> fully_shard(const torch::jit::Module& module,
                                          const Group& group,
                                          FullyShardOptions options,
                                          const UnitSelection& selection) {
  return shard(module, group, std::move(options), selection);
}

}  // namespace brigade
