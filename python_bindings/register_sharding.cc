#include <c10/util/Exception.h>
#include <pybind11/chrono.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "brigade/fsdp/segmented_model.h"
#include "brigade/hooks/autograd_hooks.h"
#include "brigade/python_bindings/registrations.h"

namespace brigade {
namespace {

// Hides a function's operators from dispatch modes, as those of selective
// activation checkpoints, which count the operators of forward.
struct HiddenFromModes {
  c10::impl::ExcludeDispatchKeyGuard no_modes{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};
using Hidden = py::call_guard<HiddenFromModes, py::gil_scoped_release>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Its flats move to the ShardedModel that takes the unit over.
using ShardedUnitPtr = std::shared_ptr<ShardedUnit>;

ShardedUnitPtr make_unit(
    std::string name, const std::vector<std::string>& names,
    const std::vector<at::Tensor>& parameters, const Group& group,
    const FullyShardOptions& options, bool reshard_after_forward,
    bool spans_segments,
    const std::optional<std::vector<int64_t>>& block_numels,
    const std::optional<std::vector<std::optional<at::ScalarType>>>& dtypes) {
  UnitRequest request = {.name = std::move(name),
                         .reshard_after_forward = false,
                         .spans_segments = spans_segments};
  if (reshard_after_forward) {
    request.reshard_after_forward = options.reshard_after_forward;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    UnitParameter& parameter = request.parameters.emplace_back(
        UnitParameter{.name = names.at(i), .tensor = parameters[i]});
    if (block_numels) parameter.block_numel = block_numels->at(i);
    if (dtypes) parameter.compute_dtype = dtypes->at(i);
  }
  return std::make_shared<ShardedUnit>(std::move(
      make_sharded_units({std::move(request)}, group, options).front()));
}

void rename(ShardedUnit& unit, const std::string& name,
            const std::vector<std::string>& names) {
  unit.name = name;
  for (const auto& flat : unit.flats) {
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      const auto place = std::ranges::find_if(
          unit.parameters, [&](const at::Tensor& parameter) {
            return parameter.is_same(flat->parameters()[i].tensor);
          });
      flat->rename(
          i, names.at(static_cast<size_t>(place - unit.parameters.begin())));
    }
  }
}

// See the docstring of ShardedModel.
using ParentAndMesh =
    std::pair<std::optional<size_t>,
              std::optional<std::tuple<std::vector<int>, int, std::string>>>;

std::shared_ptr<SegmentedModel> make_model(
    const std::vector<ShardedUnitPtr>& pending, const Group& group,
    const FullyShardOptions& options,
    const std::vector<ParentAndMesh>& places) {
  for (const ShardedUnitPtr& unit : pending) {
    TORCH_CHECK(!unit->flats.empty(),
                "fully_shard: a unit already has an outermost module.\nRun the "
                "first forward through the outermost module.");
  }
  std::vector<ShardedUnit> units;
  for (size_t i = 0; i < pending.size(); ++i) {
    ShardedUnit& unit = units.emplace_back(std::move(*pending[i]));
    const auto& [parent, mesh] = places.at(i);
    unit.parent = parent;
    if (!mesh) continue;
    const auto& [ranks, num_shards, name] = *mesh;
    unit.mesh = UnitMesh{.ranks = ranks, .num_shards = num_shards};
    unit.mesh_hash = std::hash<std::string>{}(name);
  }
  try {
    return destroyed_without_gil(
        std::make_unique<SegmentedModel>(std::move(units), group, options));
  } catch (...) {  // the caller keeps the units
    for (size_t i = 0; i < units.size(); ++i) *pending[i] = std::move(units[i]);
    throw;
  }
}

// Returns true if there are accumulated gradients that are not reduced yet.
bool holds_gradients(const SegmentedModel& model) {
  return std::ranges::any_of(model.units(), [](const ShardedUnit& unit) {
    return std::ranges::any_of(unit.flats, [](const auto& flat) {
      return flat->has_gradients() || flat->has_partial_sum();
    });
  });
}

// Unshards a unit for compiled code, which reads memory without operators.
void use_in_backward(SegmentedModel& model, size_t unit) {
  for (const at::Tensor& parameter : model.units().at(unit).parameters) {
    const Shard* const shard = shard_of(parameter);
    if (shard == nullptr) continue;
    model.use({&shard, 1});
    return;
  }
}

Shard& sharded(const at::Tensor& tensor) {
  Shard* const shard = shard_of(tensor);
  TORCH_CHECK_VALUE(
      shard != nullptr,
      "expected a sharded tensor, found an unsharded one of shape ",
      tensor.sizes(), ".");
  return *shard;
}

at::Tensor shard_like(const at::Tensor& full, const at::Tensor& like) {
  const Shard& shard = sharded(like);
  TORCH_CHECK_VALUE(full.sizes() == like.sizes(), "shard_like: expected shape ",
                    like.sizes(), ", found ", full.sizes(), ".");
  const at::NoGradGuard no_grad;
  at::Tensor in_order = full.detach();
  if (in_order.strides() != like.strides()) {
    in_order = at::empty_strided(like.sizes(), like.strides(), full.options())
                   .copy_(in_order);
  }
  return make_sharded_like(like,
                           in_order.as_strided({in_order.numel()}, {1})
                               .narrow(0, shard.offset, shard.local.numel())
                               .clone());
}

void set_shard(const at::Tensor& tensor, const at::Tensor& other) {
  Shard& before = sharded(tensor);
  if (before.owner != nullptr) before.owner->written(before.unit);
  sharded(other);
  TORCH_CHECK_VALUE(
      tensor.sizes() == other.sizes() && tensor.strides() == other.strides(),
      "fully_shard: the shape and strides of a sharded parameter can't "
      "change.\n"
      "Change them before fully_shard.");
  before.owner = nullptr;  // handles of the old shard may outlive the model
  const bool requires_grad = tensor.requires_grad();
  tensor.unsafeGetTensorImpl()->shallow_copy_from(
      other.detach().getIntrusivePtr());
  if (requires_grad != tensor.requires_grad()) {
    tensor.unsafeGetTensorImpl()->set_requires_grad(requires_grad);
  }
}

void register_timeline(py::module_& module) {
  py::class_<GatherTimes>(module, "GatherTimes",
                          "Steady-clock times of an all-gather in ns; 0: did "
                          "not happen.")
      .def_readonly("unit", &GatherTimes::unit)
      .def_property_readonly("is_in_forward",
                             [](const GatherTimes& self) {
                               return self.pass == GatheredIn::kForward;
                             })
      .def_readonly("launch_ns", &GatherTimes::launch_ns)
      .def_readonly("complete_ns", &GatherTimes::complete_ns)
      .def_readonly("needed_ns", &GatherTimes::needed_ns)
      .def_readonly("unsharded_ns", &GatherTimes::unsharded_ns)
      .def_property_readonly("exposed_ns", &GatherTimes::exposed_ns,
                             "How long forward or backward waited for it.");
  py::class_<ReductionTimes>(module, "ReductionTimes",
                             "Steady-clock times of a reduction in ns; 0: did "
                             "not happen.")
      .def_readonly("unit", &ReductionTimes::unit)
      .def_readonly("launch_ns", &ReductionTimes::launch_ns)
      .def_readonly("complete_ns", &ReductionTimes::complete_ns);
  py::class_<ShardingTimeline>(module, "ShardingTimeline",
                               "Times of one sampled step; str() is a table. "
                               "See observing/timeline.h.")
      .def_readonly("iteration", &ShardingTimeline::iteration,
                    "0: no step has been sampled.")
      .def_readonly("forward_begin_ns", &ShardingTimeline::forward_begin_ns)
      .def_readonly("forward_end_ns", &ShardingTimeline::forward_end_ns)
      .def_readonly("backward_begin_ns", &ShardingTimeline::backward_begin_ns)
      .def_readonly("backward_end_ns", &ShardingTimeline::backward_end_ns)
      .def_readonly("finalize_end_ns", &ShardingTimeline::finalize_end_ns)
      .def_readonly("gathers", &ShardingTimeline::gathers, "In launch order.")
      .def_readonly("reductions", &ShardingTimeline::reductions,
                    "In launch order.")
      .def("exposed_ns", &ShardingTimeline::exposed_ns, py::arg("reduction"),
           "Returns how long finalization waited for this reduction alone, "
           "after backward and after earlier reductions.")
      .def("chrome_trace",
           py::overload_cast<const ShardingTimeline&, int>(&to_chrome_trace),
           py::arg("rank"),
           "Returns JSON for Perfetto and Holistic Trace Analysis. `rank`: "
           "dist.get_rank().")
      .def("__str__",
           [](const ShardingTimeline& self) { return describe(self); });
}

}  // namespace

void register_sharding(py::module_& module) {
  set_error_taker([](std::exception& error) {
    if (auto* const in_python = dynamic_cast<python_error*>(&error)) {
      in_python->persist();
    }
  });

  py::class_<FullyShardOptions>(module, "FullyShardOptions",
                                "See fsdp/sharded_model.h.")
      .def(py::init([](std::optional<int> num_shards,
                       std::optional<int> reshard_to, size_t prefetch_depth,
                       std::optional<at::ScalarType> param_dtype,
                       std::optional<at::ScalarType> reduce_dtype,
                       bool broadcast_parameters,
                       std::optional<at::ScalarType> wire_dtype,
                       bool reproducible) {
             using Reshard = std::variant<bool, int>;
             return FullyShardOptions{
                 .num_shards = num_shards,
                 .reshard_after_forward =
                     reshard_to ? Reshard(*reshard_to) : Reshard(true),
                 .prefetch_depth = prefetch_depth,
                 .param_dtype = param_dtype,
                 .reduce_dtype = reduce_dtype,
                 .reproducible = reproducible,
                 .comm_hook =
                     wire_dtype ? compression_hook(*wire_dtype) : nullptr,
                 .broadcast_parameters = broadcast_parameters};
           }),
           py::kw_only(), py::arg("num_shards"), py::arg("reshard_to"),
           py::arg("prefetch_depth"), py::arg("param_dtype"),
           py::arg("reduce_dtype"), py::arg("broadcast_parameters"),
           py::arg("wire_dtype"), py::arg("reproducible"),
           "`wire_dtype`: dtype of compressed gradients, or None.");

  py::class_<UnitSettings>(module, "UnitSettings", "See fsdp/sharded_model.h.")
      .def_readwrite("reshard_after_forward",
                     &UnitSettings::reshard_after_forward)
      .def_readwrite("reshard_to", &UnitSettings::reshard_to)
      .def_readwrite("reshard_after_backward",
                     &UnitSettings::reshard_after_backward)
      .def_readwrite("gathers_in_backward", &UnitSettings::gathers_in_backward)
      .def_readwrite("gradient_divisor", &UnitSettings::gradient_divisor)
      .def_readwrite("synchronizes", &UnitSettings::synchronizes)
      .def_readwrite("sums_over_replicas", &UnitSettings::sums_over_replicas)
      .def_readwrite("keeps_storage", &UnitSettings::keeps_storage)
      .def_readwrite("forward_prefetch_depth",
                     &UnitSettings::forward_prefetch_depth)
      .def_readwrite("backward_prefetch_depth",
                     &UnitSettings::backward_prefetch_depth);

  py::class_<ShardedUnit, ShardedUnitPtr>(
      module, "ShardedUnit",
      "The sharded parameters of a unit; a ShardedModel takes them over.")
      .def(
          py::init(&make_unit), NoGil(),
          "Collective; shards the parameters in place. By parameter: "
          "`block_numels`, the number of consecutive elements that stay on one "
          "rank; `dtypes`, compute dtypes.")
      .def("rename", &rename,
           "Sets the paths in the outermost module, for errors.")
      .def_property_readonly(
          "settings",
          [](ShardedUnit& self) {
            return self.flats.empty() ? nullptr : &self.settings;
          },
          py::return_value_policy::reference_internal,
          "None after a ShardedModel has taken the unit over.");

  register_timeline(module);

  module.def("is_sharded", [](const at::Tensor& tensor) {
    return shard_of(tensor) != nullptr;
  });
  module.def(
      "local_of",
      [](const at::Tensor& tensor) {
        const Shard& shard = sharded(tensor);
        if (shard.owner != nullptr) shard.owner->written(shard.unit);
        return shard.local;
      },
      "Returns this rank's elements, 1-D in memory order. Read or write them "
      "before the next forward.");
  module.def(
      "offset_of",
      [](const at::Tensor& tensor) { return sharded(tensor).offset; },
      "Returns the index of the first local element in the unsharded tensor.");
  module.def(
      "alias_key",
      [](const at::Tensor& tensor) {
        const Shard& shard = sharded(tensor);
        const auto* const storage =
            shard.local.storage().unsafeGetStorageImpl();
        return std::pair(reinterpret_cast<uintptr_t>(storage),
                         shard.flat_offset);
      },
      "Returns a key that is equal only for aliases, also without local "
      "elements. Valid while the tensor lives.");
  module.def(
      "full_tensor",
      [](const at::Tensor& tensor) {
        sharded(tensor);
        return gather_whole(tensor);
      },
      NoGil(), "Returns the unsharded tensor. Collective.");
  module.def("shard_like", &shard_like, NoGil(),
             "Returns this rank's shard of `full`, sharded like `like`.");
  module.def("set_shard", &set_shard,
             "Gives `tensor` the shard, dtype and device of `other`.");

  py::class_<SegmentedModel, std::shared_ptr<SegmentedModel>>(
      module, "ShardedModel", "See fsdp/sharded_model.h.")
      .def(
          py::init(&make_model), NoGil(),
          "Collective. Takes the units over. `places`: by unit, the index of "
          "its parent unit, and its mesh if that is not the group's: the ranks "
          "in the group, the number of shards, and a name that is equal on "
          "these ranks.")
      .def("begin_forward", &SegmentedModel::begin_forward, Hidden())
      .def("end_forward", &SegmentedModel::end_forward, Hidden())
      .def(
          "forward_failed",
          [](SegmentedModel& self, const std::string& message) {
            self.forward_failed(
                std::make_exception_ptr(std::runtime_error(message)));
          },
          Hidden())
      .def_property_readonly("is_in_forward", &SegmentedModel::is_in_forward)
      .def("use_in_backward", &use_in_backward, Hidden())
      .def("unshard", &SegmentedModel::unshard, Hidden(), py::arg("units"),
           py::arg("may_write") = false)
      .def("reshard", &SegmentedModel::reshard,
           py::call_guard<HiddenFromModes, torch::PyWarningHandler,
                          py::gil_scoped_release>(),
           py::arg("units"), py::arg("drops_writes") = false)
      .def("reduce", &SegmentedModel::reduce, NoGil(),
           "Reduces accumulated gradients. Collective.")
      .def("clip_grad_norm", &SegmentedModel::clip_grad_norm, NoGil(),
           py::arg("max_norm"), py::arg("norm_type") = 2.0)
      .def("num_ranks_with", &SegmentedModel::num_ranks_with, NoGil(),
           "Returns the number of ranks that pass True. Collective.")
      .def("step_without_data", &SegmentedModel::step_without_data, NoGil())
      .def("meet_peers", &SegmentedModel::barrier, NoGil(), "Collective.")
      .def("await_statuses", &SegmentedModel::await_statuses, NoGil())
      .def("set_synchronizes", &SegmentedModel::set_requires_gradient_sync)
      .def("settings", &SegmentedModel::settings,
           py::return_value_policy::reference_internal)
      .def("set_max_reducing", &SegmentedModel::set_max_reducing)
      .def("holds_gradients", &holds_gradients)
      .def("add_gradient", &SegmentedModel::add_gradient, NoGil())
      .def("gradient_slot", &SegmentedModel::gradient_slot, NoGil())
      .def("timeline", &SegmentedModel::timeline, NoGil())
      .def("units_to_keep", &SegmentedModel::units_to_keep, NoGil(),
           py::arg("max_bytes"))
      .def("set_timeline_sample_rate",
           &SegmentedModel::set_timeline_sample_rate, NoGil())
      .def("set_stall_report_after", &SegmentedModel::set_stall_report_after,
           NoGil())
      .def("explain", &SegmentedModel::explain, NoGil())
      .def(
          "statistics",
          [](const SegmentedModel& self) {
            const ShardedModelStatistics found = self.statistics();
            return std::map<std::string, int64_t>{
                {"segments", found.segments},
                {"learned_segments", found.learned_segments},
                {"rounds", found.rounds},
                {"late_gradients", found.late_gradients},
                {"all_gathers", found.all_gathers},
                {"reductions", found.reductions},
                {"reduced_backwards", found.reduced_backwards},
                {"sent_by_gathers", found.sent_by_gathers},
                {"sent_by_sums", found.sent_by_sums},
                {"buffer_bytes", found.buffer_bytes},
                {"peak_buffer_bytes", found.peak_buffer_bytes},
                {"shard_bytes", found.shard_bytes},
                {"padding_bytes", found.padding_bytes}};
          },
          NoGil());
}

}  // namespace brigade
