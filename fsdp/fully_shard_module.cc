#include "brigade/fsdp/fully_shard_module.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

// One module of a tree, parents before children.
struct TreeNode {
  std::string name;
  std::string type;
  std::optional<size_t> parent = std::nullopt;
  const torch::nn::Module* module = nullptr;
  std::vector<ParameterSpec> parameters = {};  // its own
  int64_t numel = 0;                           // with those inside
};

using Tree = std::vector<TreeNode>;

std::string joined(const std::string& outer, const std::string& inner) {
  return outer.empty() ? inner : absl::StrCat(outer, ".", inner);
}

void count_elements(Tree& tree) {
  for (size_t i = tree.size(); i-- > 0;) {
    for (const ParameterSpec& parameter : tree[i].parameters) {
      tree[i].numel += parameter.tensor.numel();
    }
    if (tree[i].parent) tree[*tree[i].parent].numel += tree[i].numel;
  }
}

void add_to(Tree& tree, const torch::nn::Module& module,
            const std::string& name, std::optional<size_t> parent) {
  const size_t place = tree.size();
  tree.push_back({.name = name,
                  .type = module.name(),
                  .parent = parent,
                  .module = &module});
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    tree[place].parameters.push_back(
        {.name = joined(name, item.key()), .tensor = item.value()});
  }
  for (const auto& child : module.named_children()) {
    add_to(tree, *child.value(), joined(name, child.key()), place);
  }
}

void add_to(Tree& tree, const torch::jit::Module& module,
            const std::string& name, std::optional<size_t> parent) {
  const size_t place = tree.size();
  tree.push_back({.name = name,
                  .type = module.type()->name()->qualifiedName(),
                  .parent = parent});
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    tree[place].parameters.push_back(
        {.name = joined(name, item.name), .tensor = item.value});
  }
  for (const auto& child : module.named_children()) {
    add_to(tree, child.value, joined(name, child.name), place);
  }
}

bool holds_a_list(const TreeNode& node) {
  const auto is_named = [&](std::string_view name) {
    return node.type.find(name) != std::string::npos;
  };
  return is_named("Sequential") || is_named("ModuleList");
}

// By node of the tree.
std::vector<char> default_units(const Tree& tree) {
  std::vector<char> is_unit(tree.size(), 0);
  const auto mark_children = [&](const auto& is_parent) {
    bool marks = false;
    for (size_t i = 1; i < tree.size(); ++i) {
      if (tree[i].numel == 0 || !is_parent(*tree[i].parent)) continue;
      is_unit[i] = 1;
      marks = true;
    }
    return marks;
  };
  if (!mark_children([&](size_t i) { return holds_a_list(tree[i]); })) {
    mark_children([](size_t i) { return i == 0; });
  }
  return is_unit;
}

// Units of a tree: the outermost first, then in the order of registration.
class UnitBuilder {
 public:
  UnitBuilder(const Tree& tree, const UnitSelection& selection)
      : tree_(tree), selection_(selection), unit_of_(tree.size(), 0) {
    requests_.push_back(
        {.name = "", .reshard_after_forward = std::optional(false)});
  }

  std::vector<UnitRequest> build() {
    const std::vector<char> defaults = selection_.is_unit
                                           ? std::vector<char>(tree_.size(), 0)
                                           : default_units(tree_);
    for (size_t i = 1; i < tree_.size(); ++i) {
      unit_of_[i] = unit_of_[*tree_[i].parent];
      if (tree_[i].numel == 0) continue;
      choose_unit(i, defaults[i] != 0);
    }
    // A parameter in two units is the outermost one's.
    std::unordered_map<const c10::TensorImpl*, size_t> units_of;
    std::vector<const ParameterSpec*> in_order;
    for (size_t i = 0; i < tree_.size(); ++i) {
      for (const ParameterSpec& parameter : tree_[i].parameters) {
        if (selection_.is_ignored &&
            selection_.is_ignored(parameter.name, parameter.tensor)) {
          continue;
        }
        const auto [found, is_new] = units_of.emplace(
            parameter.tensor.unsafeGetTensorImpl(), unit_of_[i]);
        if (is_new) {
          in_order.push_back(&parameter);
        } else if (found->second != unit_of_[i]) {
          found->second = 0;
        }
      }
    }
    for (const ParameterSpec* const parameter : in_order) {
      ParameterSpec spec = *parameter;
      if (selection_.adjust) selection_.adjust(spec);
      requests_[units_of.at(spec.tensor.unsafeGetTensorImpl())]
          .parameters.push_back(std::move(spec));
    }
    return without_empty_units();
  }

 private:
  void choose_unit(size_t node, bool by_default) {
    const UnitCandidate2 candidate = {.name = tree_[node].name,
                                      .type = tree_[node].type,
                                      .numel = tree_[node].numel,
                                      .module = tree_[node].module};
    if (selection_.joint_unit_of) {
      if (const auto joint = selection_.joint_unit_of(candidate)) {
        const auto [found, is_new] =
            joint_units_.emplace(*joint, requests_.size());
        if (is_new) {
          requests_.push_back(
              {.name = *joint, .parent = 0, .spans_segments = true});
        }
        unit_of_[node] = found->second;
        return;
      }
    }
    if (selection_.is_unit ? !selection_.is_unit(candidate) : !by_default) {
      return;
    }
    requests_.push_back(
        {.name = tree_[node].name, .parent = unit_of_[*tree_[node].parent]});
    if (selection_.mesh_of) {
      requests_.back().mesh = selection_.mesh_of(tree_[node].name);
    }
    unit_of_[node] = requests_.size() - 1;
  }

  std::vector<UnitRequest> without_empty_units() {
    std::vector<UnitRequest> kept;
    std::vector<std::optional<size_t>> places(requests_.size());
    for (size_t i = 0; i < requests_.size(); ++i) {
      std::optional<size_t> parent = requests_[i].parent;
      while (parent && !places[*parent]) parent = requests_[*parent].parent;
      if (requests_[i].parameters.empty()) continue;
      UnitRequest& request = kept.emplace_back(requests_[i]);
      request.parent = parent ? places[*parent] : std::nullopt;
      places[i] = kept.size() - 1;
    }
    return kept;
  }

  const Tree& tree_;
  const UnitSelection& selection_;
  std::vector<size_t> unit_of_;  // by node
  std::vector<UnitRequest> requests_;
  std::map<std::string, size_t> joint_units_;
};

std::unique_ptr<ShardedModel> shard_tree(
    Tree tree, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options, const UnitSelection& selection) {
  count_elements(tree);
  std::vector<ShardedUnit> units = make_sharded_units(
      UnitBuilder(tree, selection).build(), group, options);
  return std::make_unique<ShardedModel>(std::move(units), group,
                                        std::move(options));
}

}  // namespace

UnitSelection units_of_size(int64_t numel) {
  // Asked of parents before children: the deepest that is large enough counts,
  // because an outer unit keeps what inner ones don't have.
  return {.is_unit = [numel](const UnitCandidate2& candidate) {
    return candidate.numel >= numel;
  }};
}

std::unique_ptr<ShardedModel> fully_shard(
    const torch::nn::Module& module,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options, const UnitSelection& selection) {
  Tree tree;
  add_to(tree, module, "", std::nullopt);
  return shard_tree(std::move(tree), group, std::move(options), selection);
}

std::unique_ptr<ShardedModel> fully_shard(
    const torch::jit::Module& module,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options, const UnitSelection& selection) {
  Tree tree;
  add_to(tree, module, "", std::nullopt);
  return shard_tree(std::move(tree), group, std::move(options), selection);
}

}  // namespace brigade
