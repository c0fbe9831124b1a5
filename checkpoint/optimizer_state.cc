#include "brigade/checkpoint/optimizer_state.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace brigade {
namespace {

namespace optim = torch::optim;
using Json = nlohmann::json;

constexpr char kTypeKey[] = "brigade.optimizer";
constexpr char kOptionsKey[] = "brigade.optimizer.options";
constexpr char kStep[] = "step";
constexpr char kLoadAlone[] =
    ".\nMake the optimizer as the saved one was made, or load the parameters "
    "alone.";

// ---- LibTorch's optimizers.

// Calls use(name, value) for each option.
template <typename Options, typename Use>
void visit_options(Options& options, const Use& use) {
#define BRIGADE_VISIT(option) \
  if constexpr (requires { options.option(); }) use(#option, options.option())
  BRIGADE_VISIT(lr);
  BRIGADE_VISIT(betas);
  BRIGADE_VISIT(alpha);
  BRIGADE_VISIT(eps);
  BRIGADE_VISIT(weight_decay);
  BRIGADE_VISIT(amsgrad);
  BRIGADE_VISIT(momentum);
  BRIGADE_VISIT(dampening);
  BRIGADE_VISIT(nesterov);
  BRIGADE_VISIT(centered);
  BRIGADE_VISIT(lr_decay);
  BRIGADE_VISIT(initial_accumulator_value);
#undef BRIGADE_VISIT
}

// Calls use(name, value) for each value that is kept under these options.
template <typename State, typename Options, typename Use>
void visit_state(State& state, const Options& options, const Use& use) {
  if constexpr (requires { state.step(); }) use(kStep, state.step());
  if constexpr (requires { state.sum(); }) use("sum", state.sum());
  if constexpr (requires { state.square_avg(); }) {
    use("square_avg", state.square_avg());
  }
  if constexpr (requires { state.exp_avg(); }) {
    use("exp_avg", state.exp_avg());
    use("exp_avg_sq", state.exp_avg_sq());
    if (options.amsgrad()) use("max_exp_avg_sq", state.max_exp_avg_sq());
  }
  if constexpr (requires { state.momentum_buffer(); }) {
    if (options.momentum() != 0) {
      use("momentum_buffer", state.momentum_buffer());
    }
  }
  if constexpr (requires { state.grad_avg(); }) {
    if (options.centered()) use("grad_avg", state.grad_avg());
  }
}

// The functions of one optimizer type.
struct OptimizerType {
  using Field = std::variant<at::Tensor*, int64_t*>;

  std::string name;
  bool (*is_type_of)(const optim::Optimizer&);
  std::string (*options_of)(optim::OptimizerOptions&);
  void (*set_options)(optim::OptimizerOptions&, const Json&);
  std::unique_ptr<optim::OptimizerParamState> (*make_state)();
  std::map<std::string, Field> (*fields)(optim::OptimizerParamState&,
                                         const optim::OptimizerOptions&);
};

template <typename Optimizer, typename State, typename Options>
OptimizerType make_type(std::string name) {
  return {.name = std::move(name),
          .is_type_of =
              [](const optim::Optimizer& optimizer) {
                return dynamic_cast<const Optimizer*>(&optimizer) != nullptr;
              },
          .options_of =
              [](optim::OptimizerOptions& options) {
                Json json;
                visit_options(static_cast<Options&>(options),
                              [&](const char* key, const auto& value) {
                                json[key] = value;
                              });
                return json.dump();
              },
          .set_options =
              [](optim::OptimizerOptions& options, const Json& json) {
                visit_options(static_cast<Options&>(options),
                              [&](const char* key, auto& value) {
                                if (json.contains(key))
                                  json.at(key).get_to(value);
                              });
              },
          .make_state = []() -> std::unique_ptr<optim::OptimizerParamState> {
            return std::make_unique<State>();
          },
          .fields =
              [](optim::OptimizerParamState& state,
                 const optim::OptimizerOptions& options) {
                std::map<std::string, OptimizerType::Field> fields;
                visit_state(static_cast<State&>(state),
                            static_cast<const Options&>(options),
                            [&](const char* key, auto& value) {
                              fields[key] = &value;
                            });
                return fields;
              }};
}

const OptimizerType& type_of(const optim::Optimizer& optimizer) {
  static const std::vector<OptimizerType> types = {
      make_type<optim::SGD, optim::SGDParamState, optim::SGDOptions>("SGD"),
      make_type<optim::Adam, optim::AdamParamState, optim::AdamOptions>("Adam"),
      make_type<optim::AdamW, optim::AdamWParamState, optim::AdamWOptions>(
          "AdamW"),
      make_type<optim::RMSprop, optim::RMSpropParamState,
                optim::RMSpropOptions>("RMSprop"),
      make_type<optim::Adagrad, optim::AdagradParamState,
                optim::AdagradOptions>("Adagrad")};
  for (const OptimizerType& type : types) {
    if (type.is_type_of(optimizer)) return type;
  }
  TORCH_CHECK_VALUE(false,
                    "expected an optimizer with state by parameter: "
                    "SGD, Adam, AdamW, RMSprop or Adagrad, found another.\n"
                    "Save and load its state as CheckpointTensors.");
}

// ---- Names and options of a checkpoint.

const CheckpointTensor& tensor_of(const std::vector<CheckpointTensor>& tensors,
                                  const OptimizerState& state,
                                  const OptimizerState::Parameter& parameter) {
  for (const CheckpointTensor& tensor : tensors) {
    const at::Tensor& known =
        tensor.parameter.defined() ? tensor.parameter : tensor.held;
    if (known.is_same(parameter.parameter)) return tensor;
  }
  TORCH_CHECK_VALUE(false, "parameter ", &parameter - state.parameters.data(),
                    " of the optimizer is not in this model.\nMake the "
                    "optimizer of the model's parameters, or of their shards "
                    "if it is sharded.");
}

// An option of this value has the same effect as a missing one.
bool is_off(const Json& value) {
  return value.is_null() || value == false || value == 0;
}

// The options in which a group differs from the saved ones, which it gets.
std::vector<std::string> take_options(const std::string& type,
                                      const Json& saved, std::string& options) {
  std::vector<std::string> differences;
  Json own = Json::parse(options);
  for (const auto& [key, value] : saved.items()) {
    TORCH_CHECK_VALUE(own.contains(key) || is_off(value), "the checkpoint's ",
                      type, " has the option ", key, " = ", value.dump(),
                      ", which this ", type, " lacks", kLoadAlone);
    if (!own.contains(key) || own.at(key) == value) continue;
    differences.push_back(
        absl::StrCat(key, " = ", own.at(key).dump(), " became ", value.dump()));
    own[key] = value;
  }
  for (const auto& [key, value] : own.items()) {
    if (saved.contains(key) || is_off(value)) continue;
    differences.push_back(absl::StrCat(key, " = ", value.dump(),
                                       " stays, and the checkpoint lacks it"));
  }
  options = own.dump();
  return differences;
}

}  // namespace

OptimizerState state_of(const optim::Optimizer& optimizer) {
  const OptimizerType& type = type_of(optimizer);
  OptimizerState state = {.type = type.name,
                          .needs_tensors = type.name == "Adagrad",
                          .options = {},
                          .parameters = {}};
  const std::unique_ptr<optim::OptimizerParamState> none = type.make_state();
  for (const optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    const std::unique_ptr<optim::OptimizerOptions> options =
        group.options().clone();
    for (const at::Tensor& parameter : group.params()) {
      OptimizerState::Parameter& stepped = state.parameters.emplace_back();
      stepped.parameter = parameter;
      stepped.group = state.options.size();
      for (const auto& [name, value] : type.fields(*none, *options)) {
        stepped.fields.push_back(name);
      }
      const auto kept = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (kept == optimizer.state().end()) continue;
      for (const auto& [name, value] : type.fields(*kept->second, *options)) {
        const auto* const tensor = std::get_if<at::Tensor*>(&value);
        stepped.values[name] =
            tensor != nullptr
                ? **tensor
                : at::scalar_tensor(*std::get<int64_t*>(value), at::kLong);
      }
    }
    state.options.push_back(type.options_of(*options));
  }
  return state;
}

void set_state(optim::Optimizer& optimizer, const OptimizerState& state) {
  const OptimizerType& type = type_of(optimizer);
  for (const OptimizerState::Parameter& stepped : state.parameters) {
    void* const key = stepped.parameter.unsafeGetTensorImpl();
    optimizer.state().erase(key);
    if (stepped.values.empty()) continue;
    std::unique_ptr<optim::OptimizerParamState> kept = type.make_state();
    for (const auto& [name, field] : type.fields(
             *kept, optimizer.param_groups()[stepped.group].options())) {
      const at::Tensor& value = stepped.values.at(name);
      if (const auto* tensor = std::get_if<at::Tensor*>(&field)) {
        **tensor = value;
      } else {
        *std::get<int64_t*>(field) = value.item<int64_t>();
      }
    }
    optimizer.state()[key] = std::move(kept);
  }
  for (size_t g = 0; g < state.options.size(); ++g) {
    type.set_options(optimizer.param_groups()[g].options(),
                     Json::parse(state.options[g]));
  }
}

std::vector<CheckpointTensor> with_optimizer(
    const std::vector<CheckpointTensor>& tensors, const OptimizerState& state) {
  std::vector<CheckpointTensor> all = tensors;
  for (const OptimizerState::Parameter& stepped : state.parameters) {
    const CheckpointTensor& of = tensor_of(tensors, state, stepped);
    for (const auto& [name, value] : stepped.values) {
      CheckpointTensor kept = of;
      kept.name = absl::StrCat(of.name, ".", name);
      kept.held = kept.part_of == nullptr || name == kStep
                      ? value
                      : kept.part_of(value);
      if (name == kStep) {
        kept.shape = kept.strides = {};
        kept.begin = 0;
      }
      all.push_back(std::move(kept));
    }
  }
  return all;
}

SafetensorsMetadata optimizer_metadata(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::vector<CheckpointTensor>& tensors, const OptimizerState& state) {
  // By rank: [type, options of each group with its parameters' names].
  const std::vector<std::string> texts = on_all_ranks(group, [&] {
    Json groups = Json::array();
    for (const std::string& options : state.options) {
      groups.push_back(
          {{"options", Json::parse(options)}, {"parameters", Json::array()}});
    }
    for (const OptimizerState::Parameter& stepped : state.parameters) {
      groups[stepped.group]["parameters"].push_back(
          tensor_of(tensors, state, stepped).name);
    }
    return Json{state.type, std::move(groups)}.dump();
  });
  Json merged = Json::array();
  std::map<std::string, Json> options_of;  // by parameter
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const Json of_rank = Json::parse(texts[rank]);
    TORCH_CHECK_VALUE(of_rank[0] == Json::parse(texts[0])[0],
                      "expected the same optimizer on all ranks: rank 0 has ",
                      Json::parse(texts[0])[0].dump(), ", rank ", rank, " has ",
                      of_rank[0].dump());
    for (const Json& saved : of_rank[1]) {
      const Json& options = saved.at("options");
      auto same = std::ranges::find_if(merged, [&](const Json& known) {
        return known.at("options") == options;
      });
      if (same == merged.end()) {
        merged.push_back({{"options", options}, {"parameters", Json::array()}});
        same = merged.end() - 1;
      }
      for (const Json& name : saved.at("parameters")) {
        const auto [known, is_new] = options_of.emplace(name, options);
        TORCH_CHECK_VALUE(known->second == options,
                          "expected the same options of the optimizer on all "
                          "ranks, found of '",
                          known->first, "': ", known->second.dump(),
                          " and, on rank ", rank, ", ", options.dump());
        if (is_new) (*same)["parameters"].push_back(name);
      }
    }
  }
  return {{kTypeKey, state.type}, {kOptionsKey, merged.dump()}};
}

std::vector<std::string> expect_saved(
    const CheckpointContents& contents,
    const std::vector<CheckpointTensor>& tensors, OptimizerState& state) {
  const std::string where = absl::StrCat("'", contents.path, "'");
  const auto type = contents.metadata.find(kTypeKey);
  TORCH_CHECK_VALUE(type != contents.metadata.end(), where,
                    ": expected the state of ", state.type,
                    ", found no optimizer's.\nLoad the parameters alone.");
  TORCH_CHECK_VALUE(type->second == state.type, where,
                    ": expected the state of ", state.type, ", found that of ",
                    quoted_name(type->second), kLoadAlone);

  std::set<std::string> wanted;
  for (OptimizerState::Parameter& stepped : state.parameters) {
    const CheckpointTensor& parameter = tensor_of(tensors, state, stepped);
    std::set<std::string> found;
    std::string missing;
    for (const std::string& field : stepped.fields) {
      const std::string name = absl::StrCat(parameter.name, ".", field);
      contents.names.contains(name) ? void(found.insert(name))
                                    : void(missing = name);
    }
    stepped.values.clear();
    if (found.empty() && !state.needs_tensors) continue;
    TORCH_CHECK_VALUE(missing.empty(), where, " has no tensor '", missing,
                      "', which is state of this ", state.type, kLoadAlone);
    wanted.merge(found);
    for (const std::string& field : stepped.fields) {
      stepped.values[field] = field == kStep ? at::empty({}, at::kLong)
                                             : at::empty_like(stepped.parameter);
    }
  }
  // Saved state that this optimizer does not read would be lost.
  for (const CheckpointTensor& tensor : tensors) {
    for (const char* field :
         {"exp_avg", "exp_avg_sq", "grad_avg", "max_exp_avg_sq",
          "momentum_buffer", "square_avg", kStep, "sum"}) {
      const std::string name = absl::StrCat(tensor.name, ".", field);
      TORCH_CHECK_VALUE(!contents.names.contains(name) || wanted.contains(name),
                        where, " has tensor '", name,
                        "', which is no state of this ", state.type,
                        kLoadAlone);
    }
  }

  const auto saved = contents.metadata.find(kOptionsKey);
  if (saved == contents.metadata.end()) return {};
  std::map<std::string, Json> options_of;  // by parameter
  for (const Json& group : Json::parse(saved->second)) {
    for (const std::string name : group.at("parameters")) {
      options_of[name] = group.at("options");
    }
  }
  std::vector<std::string> differences;
  std::map<size_t, Json> taken;  // by group
  for (const OptimizerState::Parameter& stepped : state.parameters) {
    const std::string& name = tensor_of(tensors, state, stepped).name;
    const auto options = options_of.find(name);
    if (options == options_of.end()) continue;
    const auto [known, is_new] = taken.emplace(stepped.group, options->second);
    TORCH_CHECK_VALUE(
        known->second == options->second, where,
        ": expected the saved parameter groups, found '", name, "' in group ",
        stepped.group,
        " with parameters of other options: ", options->second.dump(), " and ",
        known->second.dump(), kLoadAlone);
    if (!is_new) continue;
    for (const std::string& text : take_options(state.type, options->second,
                                                state.options[stepped.group])) {
      differences.push_back(absl::StrCat("group ", stepped.group, ": ", text));
    }
  }
  return differences;
}

}  // namespace brigade
