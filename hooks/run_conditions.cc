#include "brigade/hooks/run_conditions.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <mutex>

namespace brigade {

RandomState RandomState::of(std::span<const at::Tensor> inputs) {
  RandomState state;
  state.add(at::globalContext().defaultGenerator(at::kCPU));
  std::vector<at::Device> devices;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || !at::isAccelerator(input.device().type()) ||
        std::find(devices.begin(), devices.end(), input.device()) !=
            devices.end()) {
      continue;
    }
    devices.push_back(input.device());
    state.add(at::globalContext().defaultGenerator(input.device()));
  }
  return state;
}

RandomState RandomState::now() const {
  RandomState state;
  for (const auto& [generator, _] : states_) state.add(generator);
  return state;
}

void RandomState::restore() const {
  for (const auto& [generator, state] : states_) {
    at::Generator writable = generator;
    const std::lock_guard<std::mutex> lock(writable.mutex());
    writable.set_state(state);
  }
}

void RandomState::add(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  at::Tensor state = generator.get_state();
  states_.emplace_back(generator, std::move(state));
}

CastState CastState::now() {
  CastState state;
  std::vector<at::DeviceType> types = {at::kCPU};
  if (const auto accelerator = at::getAccelerator()) {
    types.push_back(*accelerator);
  }
  for (const at::DeviceType type : types) {
    state.devices_.push_back(
        {.type = type,
         .is_enabled = at::autocast::is_autocast_enabled(type),
         .dtype = at::autocast::get_autocast_dtype(type)});
  }
  state.has_cache_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void CastState::restore() const {
  for (const OfDevice& device : devices_) {
    at::autocast::set_autocast_enabled(device.type, device.is_enabled);
    at::autocast::set_autocast_dtype(device.type, device.dtype);
  }
  at::autocast::set_autocast_cache_enabled(has_cache_);
}

RunConditions::RunConditions(std::span<const at::Tensor> inputs,
                             bool with_random_state)
    : cast_state_(CastState::now()),
      random_state_(with_random_state ? RandomState::of(inputs)
                                      : RandomState()),
      parameter_casts_(ParameterCasts::current()) {}

RunConditions::Guard::Guard(const RunConditions& conditions)
    : grad_mode_(true),
      cast_before_(CastState::now()),
      random_before_(conditions.random_state_.now()),
      parameter_casts_(conditions.parameter_casts_) {
  conditions.cast_state_.restore();
  at::autocast::increment_nesting();
  conditions.random_state_.restore();
}

RunConditions::Guard::~Guard() {
  random_before_.restore();
  // Casts that outlive the region would outlive the weights' values.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  cast_before_.restore();
}

}  // namespace brigade
