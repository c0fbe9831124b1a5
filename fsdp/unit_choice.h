// Which parts of a module are units, and which of its parameters are sharded at
// all.
//
//   FullySharded model(layers, group, {}, unit_at_each<Block>());
//   FullySharded model(layers, group, {}, units_of_numel(1'000'000));
//   FullySharded model(net, group, {}, {.is_ignored = is_adapter});

#ifndef BRIGADE_FSDP_UNIT_CHOICE_H_
#define BRIGADE_FSDP_UNIT_CHOICE_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>

namespace brigade {

// A child of a Sequential that has parameters, which is to be in the unit of
// the children before it, or to begin another one.
struct UnitCandidate {
  const std::string& name;
  const torch::nn::Module& module;
  int64_t numel_before;  // of the unit that it may be in
};

// Alike on all ranks.
struct UnitChoice {
  // Asked of all such children but the first. Unset: each child that has
  // parameters is a unit by itself, and children without are in none.
  std::function<bool(const UnitCandidate&)> begins_unit = nullptr;

  // What is true for stays as it is, whole on each rank: nothing gathers it or
  // averages its gradient, and it is no parameter of the sharded model. `name`:
  // as the module without Sharded has it.
  std::function<bool(const std::string& name, const at::Tensor& parameter)>
      is_ignored = nullptr;
};

// A child of one of these types begins a unit.
template <typename... Modules>
UnitChoice unit_at_each() {
  return {.begins_unit = [](const UnitCandidate& child) {
    return (... || (dynamic_cast<const Modules*>(&child.module) != nullptr));
  }};
}

// Children are put together until they have so many elements.
inline UnitChoice units_of_numel(int64_t at_least) {
  return {.begins_unit = [at_least](const UnitCandidate& child) {
    return child.numel_before >= at_least;
  }};
}

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNIT_CHOICE_H_
