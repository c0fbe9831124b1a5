#include "brigade/python_bindings/register_sharding.h"

#include <c10/util/Exception.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/group/control_device.h"
#include "brigade/comm/ranks_of_host.h"
#include "brigade/fsdp/schedule/sharding_timeline.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/fsdp/units/post_accumulate_hooks.h"
#include "brigade/fsdp/units/reduction_hook.h"

namespace brigade {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using CallPtr = std::shared_ptr<ShardedRoot::Call>;

// Python's handle of a unit, until a root takes it over.
struct ShardedUnit {
  std::optional<Unit> unit;
  std::vector<at::Tensor> shards;
  std::vector<int64_t> offsets;
};

// `use(segment, i, place)` of each parameter, which is the `place`-th that the
// unit was given.
template <typename Use>
void for_each_parameter(const Unit& unit, const Use& use) {
  for (const auto& segment : unit.segments) {
    for (size_t i = 0; i < segment->shards().size(); ++i) {
      const auto place =
          std::ranges::find_if(unit.shards, [&](const at::Tensor& shard) {
            return shard.is_same(segment->shards()[i]);
          });
      use(*segment, i, static_cast<size_t>(place - unit.shards.begin()));
    }
  }
}

// By parameter: how many of its elements are other ranks' before the first that
// this rank holds, in the order of memory.
std::vector<int64_t> offsets_of(const Unit& unit) {
  std::vector<int64_t> offsets(unit.shards.size());
  for_each_parameter(unit, [&](const Segment& segment, size_t i, size_t place) {
    offsets[place] = segment.layout().range(i, segment.rank()).in_parameter;
  });
  return offsets;
}

void rename(ShardedUnit& renamed, const std::string& name,
            const std::vector<std::string>& names) {
  if (!renamed.unit) return;
  TORCH_CHECK_VALUE(names.size() == renamed.shards.size(),
                    "rename: expected a name for each of ",
                    renamed.shards.size(), " parameters, found ", names.size(),
                    ".\nGive one each.");
  renamed.unit->name = name;
  for (const auto& segment : renamed.unit->segments) {
    segment->rename_unit(name);
  }
  for_each_parameter(*renamed.unit,
                     [&](Segment& segment, size_t i, size_t place) {
                       segment.rename_parameter(i, names[place]);
                     });
}

std::shared_ptr<ReductionHook> hook_of(
    const std::optional<at::ScalarType>& wire_dtype) {
  return wire_dtype ? compression_hook(*wire_dtype) : nullptr;
}

absl::Status check_has_no_hook(const ShardedUnit& unit) {
  if (!unit.unit) {
    return absl::FailedPreconditionError(
        "register_comm_hook: a forward has run.\nRegister it before the first "
        "one.");
  }
  if (unit.unit->comm_hook) {
    return absl::FailedPreconditionError(absl::StrCat(
        "register_comm_hook: unit '", unit.unit->name, "' has the comm hook '",
        unit.unit->comm_hook->hook_name(), "' already.\nGive one only."));
  }
  return absl::OkStatus();
}

void register_compression(
    const std::vector<std::shared_ptr<ShardedUnit>>& units,
    at::ScalarType wire_dtype, const Group& group) {
  const auto hook = compression_hook(wire_dtype);
  absl::Status status;
  for (const auto& unit : units) status.Update(check_has_no_hook(*unit));
  const std::vector<std::string> items = {absl::StrCat(
      hook->hook_name(), " for the sums of ", units.size(), " units")};
  require_agreement(group, control_device(*group), "comm hook", items, status);
  for (const auto& unit : units) unit->unit->comm_hook = hook;
}

// Waits for callbacks that may want the GIL.
void destroy_without_gil(ShardedRoot* root) {
  const py::gil_scoped_release no_gil;
  delete root;
}

std::shared_ptr<ShardedUnit> make_unit(
    std::string name, const std::vector<std::string>& names,
    const std::vector<at::Tensor>& parameters, const Group& group,
    const ShardingOptions& options,
    const std::optional<std::vector<int64_t>>& block_numels,
    const std::optional<std::vector<std::optional<at::ScalarType>>>& dtypes,
    const std::optional<std::vector<at::Tensor>>& shards) {
  UnitSpec spec = {.name = std::move(name)};
  for (size_t i = 0; i < parameters.size(); ++i) {
    NamedParameter& parameter = spec.parameters.emplace_back(
        NamedParameter{.name = names.at(i), .tensor = parameters[i]});
    if (block_numels) parameter.block_numel = block_numels->at(i);
    if (dtypes) parameter.whole_dtype = dtypes->at(i);
  }
  if (shards) spec.shards = *shards;
  std::vector<Unit> units = make_units({spec}, group, options);
  auto made = std::make_shared<ShardedUnit>();
  made->shards = units.front().shards;
  made->offsets = offsets_of(units.front());
  made->unit = std::move(units.front());
  return made;
}

// Ranks of the root's group, how many are a row, and what they have alike.
using MeshOfUnit =
    std::optional<std::tuple<std::vector<int>, int, std::string>>;

std::shared_ptr<ShardedRoot> make_root(
    const std::vector<std::shared_ptr<ShardedUnit>>& units, const Group& group,
    const ShardingOptions& options, const std::vector<MeshOfUnit>& meshes) {
  std::vector<NamedMesh> named;
  for (size_t i = 0; i < units.size(); ++i) {
    TORCH_CHECK(units[i]->unit.has_value(),
                "fully_shard: a unit has a root "
                "already.\nRun forward through the outermost module first.");
    NamedMesh& mesh =
        named.emplace_back(NamedMesh{.unit = units[i]->unit->name});
    if (!meshes.at(i)) continue;
    const auto& [ranks, num_shards, words] = *meshes[i];
    mesh.mesh = UnitMesh{.ranks = ranks, .num_shards = num_shards};
    mesh.digest = std::hash<std::string>{}(words);
  }
  const std::vector<size_t> numbers = number_meshes(group, named);
  std::vector<Unit> taken;
  for (size_t i = 0; i < units.size(); ++i) {
    taken.push_back(*std::exchange(units[i]->unit, std::nullopt));
    taken.back().mesh = std::move(named[i].mesh);
    taken.back().mesh_number = numbers[i];
  }
  return {
      std::make_unique<ShardedRoot>(std::move(taken), group, options).release(),
      destroy_without_gil};
}

std::pair<CallPtr, std::vector<at::Tensor>> begin_call(
    ShardedRoot& root, size_t unit, std::vector<at::Tensor> inputs) {
  CallPtr call = root.begin_call(unit, inputs);
  return {std::move(call), std::move(inputs)};
}

void register_timeline(py::module_& module) {
  py::class_<GatherTimes>(module, "GatherTimes",
                          "ns of the steady clock; 0: did not happen.")
      .def_readonly("unit", &GatherTimes::unit)
      .def_property_readonly("is_in_forward",
                             [](const GatherTimes& self) {
                               return self.pass == GatheredIn::kForward;
                             })
      .def_readonly("launch_ns", &GatherTimes::launch_ns)
      .def_readonly("complete_ns", &GatherTimes::complete_ns)
      .def_readonly("needed_ns", &GatherTimes::needed_ns)
      .def_readonly("whole_ns", &GatherTimes::whole_ns)
      .def_property_readonly("exposed_ns", &GatherTimes::exposed_ns,
                             "What forward or backward waited for.");
  py::class_<ReductionTimes>(module, "ReductionTimes",
                             "ns of the steady clock; 0: did not happen.")
      .def_readonly("unit", &ReductionTimes::unit)
      .def_readonly("launch_ns", &ReductionTimes::launch_ns)
      .def_readonly("complete_ns", &ReductionTimes::complete_ns);
  py::class_<ShardingTimeline>(
      module, "ShardingTimeline",
      "See fsdp/schedule/sharding_timeline.h; str() is a table.")
      .def_readonly("iteration", &ShardingTimeline::iteration,
                    "0: none has been sampled.")
      .def_readonly("forward_begin_ns", &ShardingTimeline::forward_begin_ns)
      .def_readonly("forward_end_ns", &ShardingTimeline::forward_end_ns)
      .def_readonly("backward_begin_ns", &ShardingTimeline::backward_begin_ns)
      .def_readonly("backward_end_ns", &ShardingTimeline::backward_end_ns)
      .def_readonly("finalize_end_ns", &ShardingTimeline::finalize_end_ns)
      .def_readonly("gathers", &ShardingTimeline::gathers, "In launch order.")
      .def_readonly("reductions", &ShardingTimeline::reductions,
                    "In launch order.")
      .def("exposed_ns", &ShardingTimeline::exposed_ns, py::arg("reduction"),
           "Of that one, what came behind backward and no earlier one covers.")
      .def("__str__",
           [](const ShardingTimeline& self) { return describe(self); });
}

void take_error(std::exception& error) {
  if (auto* in_python = dynamic_cast<python_error*>(&error)) {
    in_python->persist();
  }
}

}  // namespace

void register_sharding(py::module_& module) {
  set_error_taker(take_error);

  py::class_<ShardingOptions>(module, "ShardingOptions",
                              "See fsdp/sharding_options.h.")
      .def(py::init([](std::optional<int> num_shards,
                       bool reshards_after_forward, size_t prefetch_depth,
                       size_t max_reducing,
                       std::optional<at::ScalarType> param_dtype,
                       std::optional<at::ScalarType> reduce_dtype,
                       bool broadcasts_parameters,
                       std::chrono::milliseconds failure_patience,
                       std::optional<at::ScalarType> wire_dtype,
                       bool reproducible, bool trusts_versions) {
             return ShardingOptions{
                 .num_shards = num_shards,
                 .reshards_after_forward = reshards_after_forward,
                 .trusts_versions = trusts_versions,
                 .prefetch_depth = prefetch_depth,
                 .max_reducing = max_reducing,
                 .param_dtype = param_dtype,
                 .reduce_dtype = reduce_dtype,
                 .reproducible = reproducible,
                 .comm_hook = hook_of(wire_dtype),
                 .broadcasts_parameters = broadcasts_parameters,
                 .failure_patience = failure_patience};
           }),
           py::kw_only(), py::arg("num_shards") = std::nullopt,
           py::arg("reshards_after_forward") = true,
           py::arg("prefetch_depth") = 1, py::arg("max_reducing") = 2,
           py::arg("param_dtype") = std::nullopt,
           py::arg("reduce_dtype") = std::nullopt,
           py::arg("broadcasts_parameters") = true,
           py::arg("failure_patience") = std::chrono::seconds(30),
           py::arg("wire_dtype") = std::nullopt,
           py::arg("reproducible") = false, py::arg("trusts_versions") = false,
           "`wire_dtype`: of a comm hook that compresses gradients.")
      .def_readwrite("reshards_to", &ShardingOptions::reshards_to)
      .def_readwrite("broadcasts_parameters",
                     &ShardingOptions::broadcasts_parameters)
      .def_readwrite("allows_meta", &ShardingOptions::allows_meta);

  py::class_<UnitSettings>(module, "UnitSettings",
                           "See fsdp/schedule/unit_settings.h.")
      .def_readwrite("reshards_after_forward",
                     &UnitSettings::reshards_after_forward)
      .def_readwrite("spans_passes", &UnitSettings::spans_passes)
      .def_readwrite("reshards_to", &UnitSettings::reshards_to)
      .def_readwrite("reshards_after_backward",
                     &UnitSettings::reshards_after_backward)
      .def_readwrite("gathers_in_backward", &UnitSettings::gathers_in_backward)
      .def_readwrite("gradient_divisor", &UnitSettings::gradient_divisor)
      .def_readwrite("synchronizes", &UnitSettings::synchronizes)
      .def_readwrite("sums_over_replicas", &UnitSettings::sums_over_replicas)
      .def_readwrite("keeps_storage", &UnitSettings::keeps_storage)
      .def_readwrite("forward_prefetch", &UnitSettings::forward_prefetch)
      .def_readwrite("backward_prefetch", &UnitSettings::backward_prefetch);

  py::class_<ShardedUnit, std::shared_ptr<ShardedUnit>>(
      module, "ShardedUnit", "Parameters of which each rank holds a part.")
      .def(py::init(&make_unit), NoGil(), py::arg("name"), py::arg("names"),
           py::arg("parameters"), py::arg("group"), py::arg("options"),
           py::arg("block_numels") = std::nullopt,
           py::arg("dtypes") = std::nullopt, py::arg("shards") = std::nullopt,
           "Collective. `block_numels`: elements that are never cut, by "
           "parameter; `dtypes`: what it is seen in while it is whole; "
           "`shards`: leaves that become this rank's parts.")
      .def_readonly("shards", &ShardedUnit::shards,
                    "What this rank holds, by parameter.")
      .def_readonly("offsets", &ShardedUnit::offsets,
                    "Where in its parameter each begins, in the order of "
                    "memory.")
      .def("rename", &rename, py::arg("name"), py::arg("names"),
           "For errors: where it and its parameters are in the outermost "
           "module.")
      .def_static("register_compression", &register_compression, NoGil(),
                  py::arg("units"), py::arg("wire_dtype"), py::arg("group"),
                  "Collective. Their comm hook is one that compresses.")
      .def_property_readonly(
          "settings",
          [](ShardedUnit& self) -> UnitSettings* {
            return self.unit ? &self.unit->settings : nullptr;
          },
          py::return_value_policy::reference_internal,
          "None once there is a root.");

  register_timeline(module);

  module.def("ranks_of_a_host",
             py::overload_cast<const Group&>(&ranks_of_a_host), NoGil(),
             py::arg("group"),
             "Collective: how many ranks of the group are on each host.");

  py::class_<ShardedRoot::Call, CallPtr>(module, "UnitCall",
                                         "A call of a unit, in forward.");

  py::class_<ShardedRoot, std::shared_ptr<ShardedRoot>>(
      module, "ShardedRoot", "See fsdp/sharded_root.h.")
      .def(py::init(&make_root), NoGil(), py::arg("units"), py::arg("group"),
           py::arg("options"), py::arg("meshes"),
           "Collective. Takes the units over. `meshes`: by unit, the ranks of "
           "the group that it was made over, how many are a row, and what they "
           "have alike; None: as the group and options say.")
      .def("begin_forward", &ShardedRoot::begin_forward, NoGil())
      .def("end_forward", &ShardedRoot::end_forward, NoGil())
      .def(
          "forward_failed",
          [](ShardedRoot& self, const std::string& message) {
            self.forward_failed(
                std::make_exception_ptr(std::runtime_error(message)));
          },
          NoGil(), py::arg("message"))
      .def("begin_call", &begin_call, NoGil(), py::arg("unit"),
           py::arg("inputs"),
           "The unit is whole when it returns. Returns the call and stand-ins "
           "for the inputs.")
      .def(
          "end_call",
          [](ShardedRoot& self, const CallPtr& call,
             const std::vector<at::Tensor>& outputs) {
            self.end_call(call, outputs);
          },
          NoGil(), py::arg("call"), py::arg("outputs"))
      .def(
          "abort_call",
          [](ShardedRoot& self, const CallPtr& call) {
            self.abort_call(*call);
          },
          NoGil(), py::arg("call"))
      .def("gather_unit", &ShardedRoot::gather_unit, NoGil(), py::arg("unit"),
           "Collective: whole parameters, in their own dtype.")
      .def(
          "assign_unit",
          [](ShardedRoot& self, size_t unit,
             const std::vector<at::Tensor>& wholes) {
            self.assign_unit(unit, wholes);
          },
          NoGil(), py::arg("unit"), py::arg("wholes"))
      .def_property("synchronizes", &ShardedRoot::synchronizes,
                    &ShardedRoot::set_synchronizes)
      .def("unshard", py::overload_cast<>(&ShardedRoot::unshard), NoGil())
      .def("reshard", py::overload_cast<bool>(&ShardedRoot::reshard), NoGil(),
           py::arg("writes"))
      .def("unshard_unit", py::overload_cast<size_t>(&ShardedRoot::unshard),
           NoGil(), py::arg("unit"), "Collective.")
      .def("await_unit", &ShardedRoot::await_unit, NoGil(), py::arg("unit"),
           py::arg("on_released"))
      .def("reshard_unit",
           py::overload_cast<size_t, bool>(&ShardedRoot::reshard), NoGil(),
           py::arg("unit"), py::arg("writes"))
      .def("clip_grad_norm", &ShardedRoot::clip_grad_norm, NoGil(),
           py::arg("max_norm"), py::arg("norm_type") = 2.0)
      .def("sum_over_ranks", &ShardedRoot::sum_over_ranks, NoGil(),
           py::arg("values"), py::arg("takes_largest"),
           "Collective: sums, or largest, over all ranks; float64, in place.")
      .def("is_first_replica", &ShardedRoot::is_first_replica, py::arg("unit"),
           "Of those that hold this part of the unit.")
      .def("has_other_units_elsewhere", &ShardedRoot::has_other_units_elsewhere,
           "Some units are on meshes of fewer ranks than the root.")
      .def("settings", &ShardedRoot::settings, py::arg("unit"),
           py::return_value_policy::reference_internal)
      .def("set_sums_over_replicas", &ShardedRoot::set_sums_over_replicas,
           py::arg("value"))
      .def("holds_gradients", &ShardedRoot::holds_gradients)
      .def("set_max_reducing", &ShardedRoot::set_max_reducing, py::arg("value"))
      .def("reduce", &ShardedRoot::reduce, NoGil(),
           "Collective: what backwards without synchronisation have added up.")
      .def("meet_peers", &ShardedRoot::meet_peers, NoGil(), "Collective.")
      .def("num_ranks_with", &ShardedRoot::num_ranks_with, NoGil(),
           py::arg("has_data"), "Collective.")
      .def("step_without_data", &ShardedRoot::step_without_data, NoGil())
      .def("gradient_slot", &ShardedRoot::gradient_slot, py::arg("parameter"))
      .def("timeline", &ShardedRoot::timeline, NoGil())
      .def("set_timeline_sample_rate", &ShardedRoot::set_timeline_sample_rate,
           NoGil(), py::arg("sample_rate"))
      .def("set_stall_report_after", &ShardedRoot::set_stall_report_after,
           NoGil(), py::arg("time"))
      .def("explain", &ShardedRoot::explain)
      .def("can_continue", &ShardedRoot::can_continue, NoGil())
      .def("statistics", [](const ShardedRoot& self) {
        const auto [found, engine] = [&] {
          const py::gil_scoped_release no_gil;
          return std::pair(self.statistics(), self.engine_statistics());
        }();
        py::dict statistics;
        statistics["late_gathers"] = found.late_gathers;
        statistics["unneeded_gathers"] = found.unneeded_gathers;
        statistics["ahead_gathers"] = found.ahead_gathers;
        statistics["near_gathers"] = found.near_gathers;
        statistics["allocations"] = found.allocations;
        statistics["unplanned"] = found.unplanned;
        statistics["whole_bytes"] = found.whole_bytes;
        statistics["peak_whole_bytes"] = found.peak_whole_bytes;
        statistics["planned_bytes"] = found.planned_bytes;
        statistics["shard_bytes"] = found.shard_bytes;
        statistics["padding_bytes"] = found.padding_bytes;
        statistics["sent_by_gathers"] = found.sent_by_gathers;
        statistics["sent_by_sums"] = found.sent_by_sums;
        statistics["reduced"] = engine.reduced;
        statistics["reductions_launched"] = engine.units_launched;
        return statistics;
      });
}

}  // namespace brigade
