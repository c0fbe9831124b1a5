#include "brigade/fsdp/checkpoint/optimizer_type.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <utility>

namespace brigade {
namespace {

namespace optim = torch::optim;

using Fields = std::vector<StateField>;

Fields fields_of(optim::SGDParamState& state,
                 const optim::SGDOptions& options) {
  if (options.momentum() == 0) return {};
  return {{"momentum_buffer", &state.momentum_buffer()}};
}

template <typename State, typename Options>
Fields fields_of_adam(State& state, const Options& options) {
  Fields fields = {{"step", &state.step()},
                   {"exp_avg", &state.exp_avg()},
                   {"exp_avg_sq", &state.exp_avg_sq()}};
  if (options.amsgrad()) {
    fields.push_back({"max_exp_avg_sq", &state.max_exp_avg_sq()});
  }
  return fields;
}

Fields fields_of(optim::AdamParamState& state,
                 const optim::AdamOptions& options) {
  return fields_of_adam(state, options);
}

Fields fields_of(optim::AdamWParamState& state,
                 const optim::AdamWOptions& options) {
  return fields_of_adam(state, options);
}

Fields fields_of(optim::RMSpropParamState& state,
                 const optim::RMSpropOptions& options) {
  Fields fields = {{"step", &state.step()},
                   {"square_avg", &state.square_avg()}};
  if (options.momentum() > 0) {
    fields.push_back({"momentum_buffer", &state.momentum_buffer()});
  }
  if (options.centered()) fields.push_back({"grad_avg", &state.grad_avg()});
  return fields;
}

Fields fields_of(optim::AdagradParamState& state,
                 const optim::AdagradOptions& /*options*/) {
  return {{"step", &state.step()}, {"sum", &state.sum()}};
}

template <typename Optimizer, typename State, typename Options>
OptimizerType make_type(std::string name) {
  return {.name = std::move(name),
          .is_type_of =
              [](const optim::Optimizer& optimizer) {
                return dynamic_cast<const Optimizer*>(&optimizer) != nullptr;
              },
          .make_state = []() -> std::unique_ptr<optim::OptimizerParamState> {
            return std::make_unique<State>();
          },
          .fields =
              [](optim::OptimizerParamState& state,
                 const optim::OptimizerOptions& options) {
                return fields_of(static_cast<State&>(state),
                                 static_cast<const Options&>(options));
              }};
}

std::vector<OptimizerType> make_types() {
  std::vector<OptimizerType> types = {
      make_type<optim::SGD, optim::SGDParamState, optim::SGDOptions>("SGD"),
      make_type<optim::Adam, optim::AdamParamState, optim::AdamOptions>("Adam"),
      make_type<optim::AdamW, optim::AdamWParamState, optim::AdamWOptions>(
          "AdamW"),
      make_type<optim::RMSprop, optim::RMSpropParamState,
                optim::RMSpropOptions>("RMSprop"),
      make_type<optim::Adagrad, optim::AdagradParamState,
                optim::AdagradOptions>("Adagrad")};
  types.back().has_state_before_steps = true;
  return types;
}

}  // namespace

const OptimizerType* type_of(const optim::Optimizer& optimizer) {
  static const std::vector<OptimizerType> types = make_types();
  const auto found = std::ranges::find_if(
      types,
      [&](const OptimizerType& type) { return type.is_type_of(optimizer); });
  return found == types.end() ? nullptr : &*found;
}

const std::set<std::string>& all_state_fields() {
  static const std::set<std::string> fields = {
      "exp_avg",         "exp_avg_sq", "grad_avg", "max_exp_avg_sq",
      "momentum_buffer", "square_avg", "step",     "sum"};
  return fields;
}

}  // namespace brigade
