#include "brigade/fsdp/fully_shard.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/group/control_device.h"
#include "brigade/fsdp/parameter_memory.h"

namespace brigade {
namespace {

using torch::nn::Module;

struct OwnedParameter {
  NamedParameter parameter;
  size_t owner = 0;  // a unit
};

bool is_ignored(const UnitChoice& choice, const NamedParameter& parameter) {
  return choice.is_ignored &&
         choice.is_ignored(parameter.name, parameter.tensor);
}

int64_t numel_of(std::span<const NamedParameter> parameters) {
  int64_t numel = 0;
  for (const NamedParameter& parameter : parameters) {
    numel += parameter.tensor.numel();
  }
  return numel;
}

struct CollectedUnit {
  std::string name;
  bool is_joint = false;
  std::vector<UnitModule*> modules = {};
};

// Of the module whose parameters have this in front of their names.
std::string path_of(const std::string& prefix) {
  return without_unit_levels(
      prefix.substr(0, prefix.empty() ? 0 : prefix.size() - 1));
}

std::shared_ptr<Module> held_by(const UnitModule& module) {
  return module.children().front();
}

class Collector {
 public:
  explicit Collector(const UnitChoice& choice) : choice_(choice) {}

  std::vector<CollectedUnit> units = {{.name = ""}};  // outermost first
  std::vector<OwnedParameter> found;

  // `prefix`: its path and a dot; empty for the outermost. `unit`: what it is
  // in unless it is a unit itself.
  void collect(Module& module, const std::string& prefix, size_t unit) {
    auto* const unit_module = dynamic_cast<UnitModule*>(&module);
    if (unit_module != nullptr &&
        begins_unit(*held_by(*unit_module), prefix, Place::kHeld, unit)) {
      unit = unit_of(*unit_module, prefix);
      units[unit].modules.push_back(unit_module);
    }
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      add({.name = without_unit_levels(prefix + parameter.key()),
           .tensor = parameter.value()},
          unit);
    }
    for (const auto& child : module.named_children()) {
      const std::string of_child = absl::StrCat(prefix, child.key(), ".");
      if (unit_module == nullptr)
        require_no_unit(*child.value(), of_child, unit);
      collect(*child.value(), of_child, unit);
    }
  }

 private:
  using Place = UnitCandidate::Place;

  bool begins_unit(const Module& module, const std::string& prefix, Place place,
                   size_t unit) const {
    if (!choice_.begins_unit) return place == Place::kHeld;
    int64_t numel = 0;
    for (const auto& parameter : module.named_parameters()) {
      if (!is_ignored(choice_,
                      {.name = without_unit_levels(prefix + parameter.key()),
                       .tensor = parameter.value()})) {
        numel += parameter.value().numel();
      }
    }
    if (numel == 0) return false;
    int64_t numel_before = 0;
    for (const OwnedParameter& owned : found) {
      if (owned.owner == unit) numel_before += owned.parameter.tensor.numel();
    }
    return choice_.begins_unit({.name = path_of(prefix),
                                .module = module,
                                .place = place,
                                .numel = numel,
                                .numel_before = numel_before});
  }

  void require_no_unit(const Module& module, const std::string& prefix,
                       size_t unit) const {
    if (dynamic_cast<const UnitModule*>(&module) != nullptr) return;
    TORCH_CHECK_VALUE(
        !begins_unit(module, prefix, Place::kMember, unit),
        "fully_shard: expected units that Sharded holds, or children of a "
        "Sequential that is sharded itself; the rule for units chose '",
        path_of(prefix), "' (", module.name(),
        "), whose forward tells nobody that it runs.\nHold it by "
        "brigade::Sharded, as in Sharded<Block> block = "
        "register_module(\"block\", Sharded<Block>(Block(...))).");
  }

  size_t unit_of(const UnitModule& module, const std::string& prefix) {
    const std::string& joint = module.joint_unit();
    for (size_t unit = 1; unit < units.size(); ++unit) {
      if (units[unit].is_joint && units[unit].name == joint) return unit;
    }
    if (joint.empty()) {
      units.push_back({.name = path_of(prefix)});
    } else {
      units.push_back({.name = joint, .is_joint = true});
    }
    return units.size() - 1;
  }

  void add(NamedParameter parameter, size_t unit) {
    if (is_ignored(choice_, parameter)) return;
    const auto [place, is_new] =
        places_.emplace(parameter.tensor.unsafeGetTensorImpl(), found.size());
    if (is_new) {
      found.push_back({.parameter = std::move(parameter), .owner = unit});
    } else if (found[place->second].owner != unit) {
      found[place->second].owner = 0;  // tied: in the unit around both
    }
  }

  const UnitChoice& choice_;
  std::unordered_map<const void*, size_t> places_;
};

// A unit around others is called before them, and a joint one stays whole.
std::vector<size_t> in_order(const std::vector<CollectedUnit>& units) {
  std::vector<size_t> order(units.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_partition(order.begin() + 1, order.end(),
                        [&](size_t unit) { return units[unit].is_joint; });
  return order;
}

std::vector<NamedParameter> parameters_of(const std::string& name,
                                          const Module& child,
                                          const UnitChoice& choice) {
  std::vector<NamedParameter> parameters;
  for (const auto& parameter : child.named_parameters()) {
    NamedParameter named = {
        .name = without_unit_levels(absl::StrCat(name, ".", parameter.key())),
        .tensor = parameter.value()};
    if (!is_ignored(choice, named)) parameters.push_back(std::move(named));
  }
  return parameters;
}

// Of a child of a Sequential. `numel_before`: of the unit that it is in.
void require_no_unit_inside(const std::string& name, const Module& child,
                            const UnitChoice& choice, int64_t numel_before) {
  for (const auto& inner : child.named_modules("", /*include_self=*/false)) {
    const bool is_held =
        dynamic_cast<const UnitModule*>(inner.value().get()) != nullptr;
    const std::string path = absl::StrCat(name, ".", inner.key());
    const std::vector<NamedParameter> parameters =
        parameters_of(path, *inner.value(), choice);
    const bool is_chosen =
        !is_held && choice.begins_unit && !parameters.empty() &&
        choice.begins_unit({.name = path,
                            .module = *inner.value(),
                            .place = UnitCandidate::Place::kMember,
                            .numel = numel_of(parameters),
                            .numel_before = numel_before});
    TORCH_CHECK_VALUE(
        !is_held && !is_chosen,
        "fully_shard: expected children of the Sequential that are units, "
        "found '",
        name, "', in which ",
        is_held ? "Sharded holds '" : "the rule for units chose '", inner.key(),
        "' (", inner.value()->name(),
        ").\nMake the Sequential a member of a module of your own, and hold "
        "each unit by brigade::Sharded.");
  }
}

// Tied ones, which are there already, once.
void add(const std::vector<NamedParameter>& parameters, UnitSpec& spec) {
  for (const NamedParameter& parameter : parameters) {
    const bool is_there =
        std::ranges::any_of(spec.parameters, [&](const NamedParameter& there) {
          return there.tensor.is_same(parameter.tensor);
        });
    if (!is_there) spec.parameters.push_back(parameter);
  }
}

}  // namespace

SequentialUnits units_of_sequential(const torch::nn::SequentialImpl& sequential,
                                    const UnitChoice& choice) {
  SequentialUnits units;
  auto& [specs, runs] = units;
  for (const auto& child : sequential.named_children()) {
    const std::vector<NamedParameter> parameters =
        parameters_of(child.key(), *child.value(), choice);
    const int64_t numel_before =
        specs.empty() ? 0 : numel_of(specs.back().parameters);
    const bool joins =
        choice.begins_unit && !specs.empty() &&
        (parameters.empty() ||
         !choice.begins_unit({.name = child.key(),
                              .module = *child.value(),
                              .place = UnitCandidate::Place::kInSequential,
                              .numel = numel_of(parameters),
                              .numel_before = numel_before}));
    require_no_unit_inside(child.key(), *child.value(), choice,
                           joins ? numel_before : 0);
    if (joins) {
      add(parameters, specs.back());
      ++runs.back().num_children;
      continue;
    }
    runs.push_back({.unit = std::nullopt, .num_children = 1});
    if (parameters.empty()) continue;
    runs.back().unit = specs.size();
    add(parameters, specs.emplace_back(UnitSpec{.name = child.key()}));
  }
  return units;
}

ModuleUnits units_of_module(Module& module, const UnitChoice& choice) {
  Collector collector(choice);
  collector.collect(module, "", 0);
  std::vector<UnitSpec> specs(collector.units.size());
  for (size_t unit = 0; unit < specs.size(); ++unit) {
    specs[unit].name = collector.units[unit].name;
    specs[unit].spans_passes = collector.units[unit].is_joint;
  }
  for (OwnedParameter& owned : collector.found) {
    specs[owned.owner].parameters.push_back(std::move(owned.parameter));
  }
  ModuleUnits units;
  units.has_outermost = !specs.front().parameters.empty();
  for (const size_t unit : in_order(collector.units)) {
    const bool has_parameters = !specs[unit].parameters.empty();
    for (UnitModule* of_unit : collector.units[unit].modules) {
      units.modules.emplace_back(
          of_unit,
          has_parameters ? std::optional(units.specs.size()) : std::nullopt);
    }
    if (has_parameters) units.specs.push_back(std::move(specs[unit]));
  }
  return units;
}

void require_untied(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                    const torch::nn::Module& module,
                    const std::vector<UnitSpec>& sharded) {
  ParameterMemory memory;
  std::unordered_set<const c10::TensorImpl*> in_units;
  for (const UnitSpec& unit : sharded) {
    for (const NamedParameter& parameter : unit.parameters) {
      memory.take(parameter.tensor, parameter.name);
      in_units.insert(parameter.tensor.unsafeGetTensorImpl());
    }
  }
  absl::Status status;
  const auto check = [&](const char* kind, const std::string& name,
                         const at::Tensor& tensor) {
    if (in_units.contains(tensor.unsafeGetTensorImpl())) return;
    const std::string* const owner = memory.owner_of(tensor);
    if (owner == nullptr) return;
    status.Update(absl::InvalidArgumentError(absl::StrCat(
        "fully_shard: ", kind, " '", without_unit_levels(name),
        "' shares its memory with parameter '", *owner,
        "', and would no longer be tied to it once that is sharded.\nclone() "
        "it, or shard neither.")));
  };
  for (const auto& parameter : module.named_parameters()) {
    check("ignored parameter", parameter.key(), parameter.value());
  }
  for (const auto& buffer : module.named_buffers()) {
    check("buffer", buffer.key(), buffer.value());
  }
  if (!group) return;  // which is an error where ranks connect
  require_agreement(group, control_device(*group), "sharded module", {},
                    status);
}

RegisteredParameters::RegisteredParameters(
    const torch::nn::Module& module, const std::vector<UnitSpec>& sharded) {
  for (const at::Tensor& parameter : module.parameters()) {
    known_.insert(parameter.unsafeGetTensorImpl());
  }
  for (const UnitSpec& unit : sharded) {
    for (const NamedParameter& parameter : unit.parameters) {
      sharded_.insert(parameter.tensor.unsafeGetTensorImpl());
    }
  }
}

void RegisteredParameters::require(const torch::nn::Module& module) const {
  std::unordered_set<const c10::TensorImpl*> found;
  for (const auto& parameter : module.named_parameters()) {
    const c10::TensorImpl* const impl = parameter.value().unsafeGetTensorImpl();
    if (sharded_.contains(impl)) found.insert(impl);
    TORCH_CHECK(known_.contains(impl) || !parameter.value().requires_grad(),
                "fully_shard: expected the parameters that the module had when "
                "it was sharded, found '",
                without_unit_levels(parameter.key()),
                "' besides, whose gradient would stay on this rank.\nRegister "
                "it before the module is sharded.");
  }
  TORCH_CHECK(
      found.size() == sharded_.size(),
      "fully_shard: expected the parameters that the module had when it "
      "was sharded, found that ",
      sharded_.size() - found.size(),
      " of them are gone.\nChange the module before it is sharded.");
}

std::string without_unit_levels(std::string name) {
  constexpr std::string_view kLevel = "unit.";
  for (size_t at = 0; (at = name.find(kLevel, at)) != std::string::npos;) {
    if (at == 0 || name[at - 1] == '.') {
      name.erase(at, kLevel.size());
    } else {
      ++at;
    }
  }
  return name;
}

}  // namespace brigade
