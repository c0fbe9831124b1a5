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

// Calls use<State, Options>(name of the type).
template <typename Use>
auto with_type(const optim::Optimizer& optimizer, const Use& use) {
#define BRIGADE_TRY(Type)                                             \
  if (dynamic_cast<const optim::Type*>(&optimizer) != nullptr) {      \
    return use.template                                               \
    operator()<optim::Type##ParamState, optim::Type##Options>(#Type); \
  }
  BRIGADE_TRY(SGD)
  BRIGADE_TRY(Adam)
  BRIGADE_TRY(AdamW)
  BRIGADE_TRY(RMSprop)
  BRIGADE_TRY(Adagrad)
#undef BRIGADE_TRY
  TORCH_CHECK_VALUE(false,
                    "expected an optimizer with state by parameter: "
                    "SGD, Adam, AdamW, RMSprop or Adagrad, found another.\n"
                    "Save and load its state as CheckpointTensors.");
}

at::Tensor to_tensor(const at::Tensor& value) { return value; }
at::Tensor to_tensor(int64_t count) {
  return at::scalar_tensor(count, at::kLong);
}
void set_value(at::Tensor& value, const at::Tensor& saved) { value = saved; }
void set_value(int64_t& count, const at::Tensor& saved) {
  count = saved.item<int64_t>();
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
  return with_type(optimizer, [&]<typename State, typename Options>(
                                  const std::string& type) {
    OptimizerState state = {.type = type,
                            .needs_tensors = type == "Adagrad",
                            .options = {},
                            .parameters = {}};
    const State none;
    for (const optim::OptimizerParamGroup& group : optimizer.param_groups()) {
      const auto& options = static_cast<const Options&>(group.options());
      for (const at::Tensor& parameter : group.params()) {
        OptimizerState::Parameter& stepped = state.parameters.emplace_back();
        stepped.parameter = parameter;
        stepped.group = state.options.size();
        visit_state(none, options, [&](const char* name, const auto&) {
          stepped.fields.push_back(name);
        });
        const auto kept =
            optimizer.state().find(parameter.unsafeGetTensorImpl());
        if (kept == optimizer.state().end()) continue;
        visit_state(static_cast<const State&>(*kept->second), options,
                    [&](const char* name, const auto& value) {
                      stepped.values[name] = to_tensor(value);
                    });
      }
      Json json;
      visit_options(options, [&](const char* name, const auto& value) {
        json[name] = value;
      });
      state.options.push_back(json.dump());
    }
    return state;
  });
}

void set_state(optim::Optimizer& optimizer, const OptimizerState& state) {
  with_type(optimizer, [&]<typename State, typename Options>(const char*) {
    const auto options_of = [&](size_t group) -> Options& {
      return static_cast<Options&>(optimizer.param_groups()[group].options());
    };
    for (const OptimizerState::Parameter& stepped : state.parameters) {
      void* const key = stepped.parameter.unsafeGetTensorImpl();
      optimizer.state().erase(key);
      if (stepped.values.empty()) continue;
      auto kept = std::make_unique<State>();
      visit_state(*kept, options_of(stepped.group),
                  [&](const char* name, auto& value) {
                    set_value(value, stepped.values.at(name));
                  });
      optimizer.state()[key] = std::move(kept);
    }
    for (size_t g = 0; g < state.options.size(); ++g) {
      const Json saved = Json::parse(state.options[g]);
      visit_options(options_of(g), [&](const char* name, auto& value) {
        if (saved.contains(name)) saved.at(name).get_to(value);
      });
    }
  });
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
    const std::string prefix =
        absl::StrCat(tensor_of(tensors, state, stepped).name, ".");
    const auto is_saved = [&](const std::string& field) {
      return contents.names.contains(prefix + field);
    };
    stepped.values.clear();
    if (std::ranges::none_of(stepped.fields, is_saved) &&
        !state.needs_tensors) {
      continue;
    }
    for (const std::string& field : stepped.fields) {
      TORCH_CHECK_VALUE(is_saved(field), where, " has no tensor '", prefix,
                        field, "', which is state of this ", state.type,
                        kLoadAlone);
      wanted.insert(prefix + field);
      stepped.values[field] = field == kStep
                                  ? at::empty({}, at::kLong)
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
