#include "brigade/fsdp/fully_shard.h"

#include <string_view>
#include <unordered_map>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

using torch::nn::Module;

struct OwnedParameter {
  NamedParameter parameter;
  size_t owner = 0;  // a unit
};

class Collector {
 public:
  // Names of units by number; 0 is the outermost.
  std::vector<std::string> units = {""};
  std::vector<UnitModule*> modules;  // of the others
  std::vector<OwnedParameter> found;

  void collect(Module& module, const std::string& prefix, size_t unit) {
    if (auto* unit_module = dynamic_cast<UnitModule*>(&module)) {
      unit = units.size();
      modules.push_back(unit_module);
      units.push_back(without_unit_levels(
          prefix.empty() ? "" : prefix.substr(0, prefix.size() - 1)));
    }
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      add({.name = without_unit_levels(prefix + parameter.key()),
           .tensor = parameter.value()},
          unit);
    }
    for (const auto& child : module.named_children()) {
      collect(*child.value(), absl::StrCat(prefix, child.key(), "."), unit);
    }
  }

 private:
  void add(NamedParameter parameter, size_t unit) {
    const auto [place, is_new] =
        places_.emplace(parameter.tensor.unsafeGetTensorImpl(), found.size());
    if (is_new) {
      found.push_back({.parameter = std::move(parameter), .owner = unit});
    } else if (found[place->second].owner != unit) {
      found[place->second].owner = 0;  // tied: in the unit around both
    }
  }

  std::unordered_map<const void*, size_t> places_;
};

}  // namespace

ModuleUnits units_of_module(Module& module) {
  Collector collector;
  collector.collect(module, "", 0);
  std::vector<UnitSpec> specs(collector.units.size());
  for (size_t unit = 0; unit < specs.size(); ++unit) {
    specs[unit].name = collector.units[unit];
  }
  for (OwnedParameter& owned : collector.found) {
    specs[owned.owner].parameters.push_back(std::move(owned.parameter));
  }
  ModuleUnits units;
  units.has_outermost = !specs.front().parameters.empty();
  for (size_t unit = 0; unit < specs.size(); ++unit) {
    const bool has_parameters = !specs[unit].parameters.empty();
    if (unit > 0) {
      units.modules.emplace_back(
          collector.modules[unit - 1],
          has_parameters ? std::optional(units.specs.size()) : std::nullopt);
    }
    if (has_parameters) units.specs.push_back(std::move(specs[unit]));
  }
  return units;
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
