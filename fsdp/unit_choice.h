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

// A module that has parameters, and may begin a unit of its own.
struct UnitCandidate {
  enum class Place {
    kInSequential,  // else it is in the unit of the children before it
    kHeld,          // by a Sharded; else it is in the unit around it
    // Elsewhere: nobody is told when it runs, so that it can't be a unit.
    kMember,
  };

  const std::string& name;
  const torch::nn::Module& module;
  Place place;
  int64_t numel;         // of its parameters, with those of modules inside
  int64_t numel_before;  // of the unit that it is else in, so far
};

// Alike on all ranks.
struct UnitChoice {
  // Asked of the children of a Sequential that is sharded, but the first, and
  // of all modules inside of them; of any other module, of all modules below
  // it. Unset: each such child, and what Sharded holds, is a unit by itself.
  // Children without parameters are in none then. True of a kMember is an
  // error.
  std::function<bool(const UnitCandidate&)> begins_unit = nullptr;

  // What is true for stays as it is, whole on each rank: nothing gathers it or
  // averages its gradient, and it is no parameter of the sharded model. `name`:
  // as the module without Sharded has it.
  std::function<bool(const std::string& name, const at::Tensor& parameter)>
      is_ignored = nullptr;
};

// A module of one of these types begins a unit.
template <typename... Modules>
UnitChoice unit_at_each() {
  return {.begins_unit = [](const UnitCandidate& candidate) {
    return (... ||
            (dynamic_cast<const Modules*>(&candidate.module) != nullptr));
  }};
}

// Children of a Sequential are put together until they have so many elements;
// what Sharded holds is a unit if it has as many.
inline UnitChoice units_of_numel(int64_t at_least) {
  return {.begins_unit = [at_least](const UnitCandidate& candidate) {
    using enum UnitCandidate::Place;
    switch (candidate.place) {
      case kInSequential:
        return candidate.numel_before >= at_least;
      case kHeld:
        return candidate.numel >= at_least;
      case kMember:
        break;
    }
    return false;
  }};
}

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNIT_CHOICE_H_
