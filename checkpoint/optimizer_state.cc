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
    ".\nConstruct the optimizer with the saved one's arguments, or load the "
    "parameters alone.";

// Calls use("field", object.field()) if `is_kept` and the type has the field.
#define BRIGADE_VISIT(object, field, is_kept)   \
  if constexpr (requires { object.field(); }) { \
    if (is_kept) use(#field, object.field());   \
  }

template <typename Options, typename Use>
void visit_options(Options& options, const Use& use) {
  BRIGADE_VISIT(options, lr, true)
  BRIGADE_VISIT(options, betas, true)
  BRIGADE_VISIT(options, alpha, true)
  BRIGADE_VISIT(options, eps, true)
  BRIGADE_VISIT(options, weight_decay, true)
  BRIGADE_VISIT(options, amsgrad, true)
  BRIGADE_VISIT(options, momentum, true)
  BRIGADE_VISIT(options, dampening, true)
  BRIGADE_VISIT(options, nesterov, true)
  BRIGADE_VISIT(options, centered, true)
  BRIGADE_VISIT(options, lr_decay, true)
  BRIGADE_VISIT(options, initial_accumulator_value, true)
}

// Calls use(name, value) for each value that these options make the optimizer
// keep.
template <typename State, typename Options, typename Use>
void visit_state(State& state, const Options& options, const Use& use) {
  BRIGADE_VISIT(state, step, true)
  BRIGADE_VISIT(state, sum, true)
  BRIGADE_VISIT(state, square_avg, true)
  BRIGADE_VISIT(state, exp_avg, true)
  BRIGADE_VISIT(state, exp_avg_sq, true)
  BRIGADE_VISIT(state, max_exp_avg_sq, options.amsgrad())
  BRIGADE_VISIT(state, momentum_buffer, options.momentum() != 0)
  BRIGADE_VISIT(state, grad_avg, options.centered())
}
#undef BRIGADE_VISIT

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
                    "expected an optimizer of type SGD, Adam, AdamW, RMSprop "
                    "or Adagrad, found another type.\nSave and load its state "
                    "as CheckpointTensors.");
}

at::Tensor to_tensor(const at::Tensor& value) { return value; }
at::Tensor to_tensor(int64_t count) {
  return at::scalar_tensor(count, at::kLong);
}
void set_value(at::Tensor& value, const at::Tensor& saved) { value = saved; }
void set_value(int64_t& count, const at::Tensor& saved) {
  count = saved.item<int64_t>();
}

const CheckpointTensor& tensor_of(const std::vector<CheckpointTensor>& tensors,
                                  const OptimizerState& state,
                                  const OptimizerState::Parameter& parameter) {
  for (const CheckpointTensor& tensor : tensors) {
    const at::Tensor& known =
        tensor.parameter.defined() ? tensor.parameter : tensor.held;
    if (known.is_same(parameter.parameter)) return tensor;
  }
  TORCH_CHECK_VALUE(false, "parameter ", &parameter - state.parameters.data(),
                    " of the optimizer is not in this model.\nPass the model's "
                    "parameters to the optimizer, or their shards if the model "
                    "is sharded.");
}

std::vector<CheckpointTensor> with_state(
    const std::vector<CheckpointTensor>& tensors, const OptimizerState& state) {
  std::vector<CheckpointTensor> all = tensors;
  for (const OptimizerState::Parameter& stepped : state.parameters) {
    const CheckpointTensor& of = tensor_of(tensors, state, stepped);
    for (const auto& [name, value] : stepped.values) {
      CheckpointTensor kept = of;
      kept.name = absl::StrCat(of.name, ".", name);
      kept.held = value;
      if (name == kStep) {
        kept.shape = kept.strides = {};
        kept.begin = 0;
      } else if (kept.part_of != nullptr) {
        kept.held = kept.part_of(value);
      }
      all.push_back(std::move(kept));
    }
  }
  return all;
}

// True if an option of this value has the same effect as a missing one.
bool is_off(const Json& value) {
  return value.is_null() || value == false || value == 0;
}

// Replaces a group's options by the saved ones. Returns a text for each option
// that differed.
std::vector<std::string> load_options(const std::string& type,
                                      const Json& saved, std::string& options) {
  std::vector<std::string> differences;
  Json own = Json::parse(options);
  Json all = own;
  all.update(saved);
  for (const auto& [key, any] : all.items()) {
    const Json before = own.value(key, Json());
    const Json after = saved.value(key, Json());
    if (before == after || (is_off(before) && is_off(after))) continue;
    TORCH_CHECK_VALUE(own.contains(key), "the checkpoint's ", type,
                      " has the option ", key, " = ", after.dump(),
                      ", which this ", type, " does not have", kLoadAlone);
    differences.push_back(absl::StrCat(
        key, " = ", before.dump(),
        saved.contains(key) ? absl::StrCat(" became ", after.dump())
                            : " stays: the checkpoint does not have it"));
    if (saved.contains(key)) own[key] = after;
  }
  options = own.dump();
  return differences;
}

// Allocates the state that the checkpoint has of each parameter.
void allocate_values(const CheckpointContents& contents,
                     const std::vector<CheckpointTensor>& tensors,
                     OptimizerState& state) {
  std::set<std::string> wanted;
  for (OptimizerState::Parameter& stepped : state.parameters) {
    const std::string prefix =
        absl::StrCat(tensor_of(tensors, state, stepped).name, ".");
    const auto is_saved = [&](const std::string& field) {
      return contents.names.contains(prefix + field);
    };
    stepped.values.clear();
    // Adagrad expects its tensors before the first step.
    if (std::ranges::none_of(stepped.fields, is_saved) &&
        state.type != "Adagrad") {
      continue;
    }
    for (const std::string& field : stepped.fields) {
      TORCH_CHECK_VALUE(is_saved(field), "the checkpoint has no tensor '",
                        prefix, field, "', expected as state of this ",
                        state.type, kLoadAlone);
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
                        "the checkpoint has tensor '", name, "', which this ",
                        state.type, " does not use", kLoadAlone);
    }
  }
}

// Prepares `state` for loading: allocates its values and sets the saved
// options. Returns a text for each option that differed.
std::vector<std::string> prepare_state(
    const CheckpointContents& contents,
    const std::vector<CheckpointTensor>& tensors, OptimizerState& state) {
  const auto type = contents.metadata.find(kTypeKey);
  TORCH_CHECK_VALUE(type != contents.metadata.end(),
                    "expected a checkpoint with the state of ", state.type,
                    ", found one without optimizer state.\nLoad the parameters "
                    "alone.");
  TORCH_CHECK_VALUE(type->second == state.type,
                    "expected a checkpoint with the state of ", state.type,
                    ", found the state of ", type->second, kLoadAlone);
  allocate_values(contents, tensors, state);
  const Json groups = Json::parse(contents.metadata.at(kOptionsKey));
  TORCH_CHECK_VALUE(groups.size() == state.options.size(), "the checkpoint's ",
                    state.type, " has ", groups.size(),
                    " parameter groups, this one has ", state.options.size(),
                    kLoadAlone);
  std::vector<std::string> differences;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const std::string& text :
         load_options(state.type, groups[g], state.options[g])) {
      differences.push_back(absl::StrCat("group ", g, ": ", text));
    }
  }
  return differences;
}

}  // namespace

OptimizerState state_of(const optim::Optimizer& optimizer) {
  return with_type(optimizer, [&]<typename State, typename Options>(
                                  const std::string& type) {
    OptimizerState state = {.type = type, .options = {}, .parameters = {}};
    const State none;
    std::set<const void*> seen;  // parameters() lists tied ones several times
    for (const optim::OptimizerParamGroup& group : optimizer.param_groups()) {
      const auto& options = static_cast<const Options&>(group.options());
      for (const at::Tensor& parameter : group.params()) {
        if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
        OptimizerState::Parameter& stepped = state.parameters.emplace_back();
        stepped.parameter = parameter;
        stepped.group = state.options.size();
        const auto found =
            optimizer.state().find(parameter.unsafeGetTensorImpl());
        const bool has_state = found != optimizer.state().end();
        const State& kept =
            has_state ? static_cast<const State&>(*found->second) : none;
        visit_state(kept, options, [&](const char* name, const auto& value) {
          stepped.fields.push_back(name);
          if (has_state) stepped.values[name] = to_tensor(value);
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

void save_with_state(const std::string& path, CheckpointLayout layout,
                     const CheckpointModel& model, const OptimizerState* state,
                     CheckpointMetadata metadata) {
  std::vector<CheckpointTensor> tensors = model.tensors;
  if (state != nullptr) {
    metadata[kTypeKey] = state->type;
    metadata[kOptionsKey] =
        absl::StrCat("[", absl::StrJoin(state->options, ","), "]");
    on_all_ranks(model.group,
                 [&] { tensors = with_state(model.tensors, *state); });
  }
  save_tensors(model.group, tensors, path, layout, std::move(metadata));
}

LoadedCheckpoint load_with_state(const std::string& path,
                                 const CheckpointModel& model,
                                 OptimizerState* state) {
  std::vector<std::string> differences;
  std::vector<std::string> missing;
  LoadedCheckpoint loaded;
  loaded.metadata =
      load_tensors(model.group, path, [&](const CheckpointContents& contents) {
        std::vector<CheckpointTensor> wanted;
        for (const CheckpointTensor& tensor : model.tensors) {
          if (!tensor.is_optional || contents.names.contains(tensor.name)) {
            wanted.push_back(tensor);
          } else {
            missing.push_back(tensor.name);
          }
        }
        if (state == nullptr) return wanted;
        differences = prepare_state(contents, wanted, *state);
        return with_state(wanted, *state);
      });
  if (!missing.empty()) {
    loaded.warnings.push_back(
        absl::StrCat("checkpoint '", path, "' lacks the buffers ",
                     absl::StrJoin(missing, ", "), "; they are unchanged"));
  }
  if (!differences.empty()) {
    loaded.warnings.push_back(absl::StrCat(
        "checkpoint '", path, "' was saved with other options of ", state->type,
        ", which now apply: ", absl::StrJoin(differences, "; "),
        ".\nTo use other values, set them after loading."));
  }
  return loaded;
}

}  // namespace brigade
