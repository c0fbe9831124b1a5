#include "brigade/python_bindings/register_checkpoints.h"

#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "brigade/comm/process_group.h"
#include "brigade/fsdp/checkpoint/checkpointed_model.h"
#include "brigade/fsdp/checkpoint/optimizer_checkpoint.h"
#include "brigade/fsdp/checkpoint/shard_files.h"
#include "brigade/fsdp/checkpoint/sharded_state.h"
#include "brigade/fsdp/sharded_root.h"

namespace brigade {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Fields = std::map<std::string, at::Tensor>;  // by name

// What a Python optimizer keeps, or why it can't be saved.
struct PythonOptimizer {
  std::string type;
  bool has_state_before_steps = false;
  std::vector<at::Tensor> shards;
  std::vector<std::vector<std::pair<std::string, bool>>> fields;  // by shard
  std::string problem;
};

absl::StatusOr<OptimizerForm> form_of(const PythonOptimizer& optimizer) {
  if (!optimizer.problem.empty()) {
    return absl::InvalidArgumentError(optimizer.problem);
  }
  OptimizerForm form = {
      .type = optimizer.type,
      .has_state_before_steps = optimizer.has_state_before_steps,
      .stepped = {}};
  for (size_t i = 0; i < optimizer.shards.size(); ++i) {
    SteppedShard& stepped = form.stepped.emplace_back();
    stepped.shard = optimizer.shards[i];
    for (const auto& [name, is_count] : optimizer.fields.at(i)) {
      stepped.fields.push_back({.name = name, .is_count = is_count});
    }
  }
  return form;
}

CheckpointKind kind_of(bool in_shards) {
  return in_shards ? CheckpointKind::kFolder : CheckpointKind::kFile;
}

// `kept`: by shard of the optimizer; empty where it has no state.
void save(const CheckpointedModel& model, bool in_shards,
          const std::string& path, const SafetensorsMetadata& metadata,
          const std::optional<PythonOptimizer>& optimizer,
          const std::vector<Fields>& kept) {
  if (!optimizer) {
    const std::vector<ShardedTensors> tensors = {parameters_of_shards()};
    return in_shards ? save_shards(model, path, tensors, metadata)
                     : save_whole(model, path, tensors, metadata);
  }
  OptimizerFields fields;
  for (size_t i = 0; i < kept.size(); ++i) {
    if (kept[i].empty()) continue;
    fields[optimizer->shards.at(i).unsafeGetTensorImpl()] = kept[i];
  }
  save_checkpoint(model, kind_of(in_shards), path, form_of(*optimizer), fields,
                  metadata);
}

std::pair<SafetensorsMetadata, std::vector<Fields>> load(
    const CheckpointedModel& model, bool in_shards, const std::string& path,
    const std::optional<PythonOptimizer>& optimizer) {
  if (!optimizer) {
    return {in_shards ? load_shards(model, path) : load_whole(model, path), {}};
  }
  LoadedState loaded =
      load_checkpoint(model, kind_of(in_shards), path, form_of(*optimizer));
  std::vector<Fields> kept;
  for (const at::Tensor& shard : optimizer->shards) {
    kept.push_back(std::move(loaded.fields[shard.unsafeGetTensorImpl()]));
  }
  return {std::move(loaded.metadata), std::move(kept)};
}

}  // namespace

void register_checkpoints(py::module_& module) {
  py::class_<PythonOptimizer>(module, "CheckpointedOptimizer",
                              "See fsdp/checkpoint/optimizer_checkpoint.h.")
      .def(py::init(
               [](std::string type, bool has_state_before_steps,
                  std::vector<at::Tensor> shards,
                  std::vector<std::vector<std::pair<std::string, bool>>> fields,
                  std::string problem) {
                 return PythonOptimizer{
                     .type = std::move(type),
                     .has_state_before_steps = has_state_before_steps,
                     .shards = std::move(shards),
                     .fields = std::move(fields),
                     .problem = std::move(problem)};
               }),
           py::kw_only(), py::arg("type") = "",
           py::arg("has_state_before_steps") = false,
           py::arg("shards") = std::vector<at::Tensor>(),
           py::arg("fields") =
               std::vector<std::vector<std::pair<std::string, bool>>>(),
           py::arg("problem") = "",
           "`fields`: by shard, names and whether each is a count. `problem`: "
           "why there is nothing else; an error on all ranks.");
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  py::class_<CheckpointedModel>(module, "CheckpointedModel",
                                "See fsdp/checkpoint/checkpointed_model.h.")
      .def(py::init<ShardedRoot&>(), py::keep_alive<1, 2>(), py::arg("root"))
      .def(py::init([](const std::vector<std::pair<std::string, at::Tensor>>&
                           parameters,
                       const std::optional<Group>& group) {
             std::vector<NamedParameter> named;
             for (const auto& [name, tensor] : parameters) {
               named.push_back({.name = name, .tensor = tensor});
             }
             return CheckpointedModel(named,
                                      group.value_or(single_process_group()));
           }),
           py::arg("parameters"), py::arg("group"),
           "Of which each rank of the group holds all; None: this process.");
  module.def("save_checkpoint", &save, NoGil(), py::arg("model"),
             py::arg("in_shards"), py::arg("path"), py::arg("metadata"),
             py::arg("optimizer"), py::arg("kept"), "Collective.");
  module.def("load_checkpoint", &load, NoGil(), py::arg("model"),
             py::arg("in_shards"), py::arg("path"), py::arg("optimizer"),
             "Collective. The metadata, and by shard of the optimizer what it "
             "is to keep.");
}

}  // namespace brigade
