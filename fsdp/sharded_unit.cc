#include "brigade/fsdp/sharded_unit.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <span>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/process_group.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Requests = std::vector<UnitRequest>;

// ---- Checks across ranks.

std::string dtype_or_unset(const std::optional<at::ScalarType>& dtype) {
  return dtype ? describe_dtype(*dtype) : "unset";
}

std::string describe(const std::variant<bool, int>& value) {
  if (const int* const number = std::get_if<int>(&value)) {
    return absl::StrCat(*number);
  }
  return std::get<bool>(value) ? "true" : "false";
}

std::vector<std::string> describe(const FullyShardOptions& options) {
  return {absl::StrCat("num_shards: ", options.num_shards
                                           ? absl::StrCat(*options.num_shards)
                                           : "all"),
          "reshard_after_forward: " + describe(options.reshard_after_forward),
          absl::StrCat("prefetch_depth: ", options.prefetch_depth),
          "param_dtype: " + dtype_or_unset(options.param_dtype),
          "output_dtype: " + dtype_or_unset(options.output_dtype),
          "reduce_dtype: " + dtype_or_unset(options.reduce_dtype),
          "broadcast_parameters: " + describe(options.broadcast_parameters),
          "reproducible: " + describe(options.reproducible),
          absl::StrCat("max_unconfirmed_iterations: ",
                       options.max_unconfirmed_iterations),
          absl::StrCat("comm_hook: ", options.comm_hook
                                          ? options.comm_hook->hook_name()
                                          : "none")};
}

std::string describe(const UnitRequest& unit, const UnitParameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  // Units with a mesh have other names on other ranks.
  std::string text = unit.mesh ? "of a unit with its own mesh: "
                               : absl::StrCat("'", parameter.name, "' of ",
                                              describe_unit(unit.name), ": ");
  absl::StrAppend(&text,
                  tensor.defined() ? describe_tensor("", tensor) : "undefined");
  if (tensor.defined() && !tensor.requires_grad()) {
    absl::StrAppend(&text, ", frozen");
  }
  if (parameter.block_numel != 1) {
    absl::StrAppend(&text, ", block_numel ", parameter.block_numel);
  }
  if (parameter.compute_dtype) {
    absl::StrAppend(&text, ", compute_dtype ",
                    describe_dtype(*parameter.compute_dtype));
  }
  if (unit.parent) absl::StrAppend(&text, ", in unit ", *unit.parent);
  if (unit.reshard_after_forward) {
    absl::StrAppend(&text, ", reshard_after_forward ",
                    describe(*unit.reshard_after_forward));
  }
  if (unit.spans_segments) absl::StrAppend(&text, ", spans segments");
  return text;
}

void check_reshard(const std::variant<bool, int>& after_forward,
                   int num_shards) {
  const int* const found = std::get_if<int>(&after_forward);
  TORCH_CHECK_VALUE(
      found == nullptr ||
          (*found > 1 && *found < num_shards && num_shards % *found == 0),
      "fully_shard: expected reshard_after_forward to be a bool, or a divisor "
      "of num_shards (",
      num_shards, "), more than 1 and less than it, found ", *found,
      ".\nPass the number of ranks per host, or true.");
}

void check_options(const FullyShardOptions& options, int num_ranks) {
  const int num_shards = options.num_shards.value_or(num_ranks);
  TORCH_CHECK_VALUE(
      num_shards >= 1 && num_ranks % num_shards == 0,
      "fully_shard: expected num_shards to divide the world size ", num_ranks,
      ", found ", num_shards,
      ".\nPass the number of ranks per host, or leave it unset for all ranks.");
  TORCH_CHECK_VALUE(
      options.max_unconfirmed_iterations >= 0 &&
          options.max_unconfirmed_iterations <= 16,
      "fully_shard: expected max_unconfirmed_iterations from 0 to 16, found ",
      options.max_unconfirmed_iterations, ".\nPass 1.");
  for (const auto& dtype :
       {options.param_dtype, options.reduce_dtype, options.output_dtype}) {
    TORCH_CHECK_VALUE(!dtype || at::isFloatingType(*dtype),
                      "fully_shard: expected param_dtype, reduce_dtype and "
                      "output_dtype to be floating, found ",
                      *dtype, ".\nPass one of float32, float16, bfloat16.");
  }
  check_reshard(options.reshard_after_forward, num_shards);
}

// `device`: expected device, that of the first parameter.
void check_parameter(const c10d::ProcessGroup& group, const UnitRequest& unit,
                     const UnitParameter& parameter, c10::Device device) {
  const auto require = [&](bool holds, const auto&... words) {
    TORCH_CHECK_VALUE(holds, "fully_shard: parameter '", parameter.name,
                      "' of ", describe_unit(unit.name), " ", words...);
  };
  const at::Tensor& tensor = parameter.tensor;
  require(tensor.defined(), "is undefined.");
  require(tensor.device() == device, "is on ", tensor.device(),
          ", the first one on ", device, ".\nMove the module to one device.");
  require(shard_of(tensor) == nullptr,
          "is sharded already.\nShard each parameter once.");
  require(
      tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense(),
      "is not dense: it is sparse, or its elements overlap or have gaps.\nUse "
      "a contiguous parameter.");
  require(parameter.block_numel >= 1, "has block_numel ", parameter.block_numel,
          "; expected at least 1.\nPass 1, or the length of a row.");
  const at::ScalarType dtype = parameter.compute_dtype.value_or(at::kFloat);
  require(at::isFloatingType(dtype), "has compute_dtype ", dtype,
          "; expected a floating dtype.\nPass one of float32, float16, "
          "bfloat16.");
  require(
      tensor.is_leaf(),
      "is not a leaf tensor.\nShard leaves, for example the parameters of a "
      "module.");
  require(device.is_meta() || supports_device(group, device.type()), "is on ",
          device,
          ", for which the process group has no backend.\nMove the module to "
          "the group's device before fully_shard().");
}

void check_units(const c10d::ProcessGroup& group, const Requests& requests,
                 int num_shards) {
  ParameterMemory memory;
  std::optional<c10::Device> device;
  for (const UnitRequest& unit : requests) {
    TORCH_CHECK_VALUE(!unit.parameters.empty(),
                      "fully_shard: ", describe_unit(unit.name),
                      " has no parameters.\nChoose a module that has some.");
    check_reshard(unit.reshard_after_forward.value_or(true),
                  unit.mesh ? unit.mesh->shard_group_size() : num_shards);
    for (const UnitParameter& parameter : unit.parameters) {
      if (!device && parameter.tensor.defined()) {
        device = parameter.tensor.device();
      }
      check_parameter(group, unit, parameter, device.value_or(at::kCPU));
      const std::string name =
          absl::StrCat("'", parameter.name, "' of ", describe_unit(unit.name));
      const std::string* const owner = memory.take(parameter.tensor, name);
      TORCH_CHECK_VALUE(owner == nullptr, "fully_shard: parameter ", name,
                        " shares its memory with ", *owner,
                        ".\nPut tied parameters into one unit, and list them "
                        "once.");
    }
  }
}

void require_equal_requests(const Group& group, const Requests& requests,
                            const FullyShardOptions& options) {
  absl::Status status;
  try {
    check_options(options, group->getSize());
    check_units(*group, requests,
                options.num_shards.value_or(group->getSize()));
  } catch (const c10::ValueError& error) {
    status = absl::InvalidArgumentError(error.what_without_backtrace());
  }
  require_agreement(group, "fully_shard: option", describe(options), status);
  std::vector<std::string> items;
  for (const UnitRequest& unit : requests) {
    for (const UnitParameter& parameter : unit.parameters) {
      items.push_back(describe(unit, parameter));
    }
  }
  require_agreement(group, "fully_shard: parameter", items, absl::OkStatus());
}

// ---- Meshes.

// Hashes the names, which are equal on the ranks of one mesh only.
uint64_t hash_of_names(const UnitRequest& unit) {
  size_t hash = std::hash<std::string>{}(unit.name);
  for (const UnitParameter& parameter : unit.parameters) {
    hash = c10::hash_combine(hash, std::hash<std::string>{}(parameter.name));
  }
  return hash;
}

void broadcast_parameters(const Group& group, const Requests& requests,
                          const std::vector<MeshRequest>& meshes) {
  const at::NoGradGuard no_grad;
  std::map<size_t, std::vector<at::Tensor>> by_mesh;
  std::map<size_t, std::vector<int>> ranks;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (meshes[i].mesh) ranks[meshes[i].number] = meshes[i].mesh->ranks;
    for (const UnitParameter& parameter : requests[i].parameters) {
      if (parameter.tensor.is_meta()) continue;
      by_mesh[meshes[i].number].push_back(parameter.tensor.detach());
    }
  }
  for (const auto& [number, tensors] : by_mesh) {
    if (number == 0) {
      broadcast_tensors(group, tensors, 0);
    } else {
      const GroupScope scope(
          make_subgroup(group, ranks[number], tensors.front().device()));
      broadcast_tensors(scope.group(), tensors, 0);
    }
  }
}

// ---- Units.

// Groups the parameters by dtype and compute dtype. Frozen ones are separate,
// so that no zeros are reduced for them.
auto flats_of(const UnitRequest& unit) {
  using Kind = std::tuple<at::ScalarType, bool, std::optional<at::ScalarType>>;
  std::map<Kind, std::vector<UnitParameter>> flats;
  for (const UnitParameter& parameter : unit.parameters) {
    flats[{parameter.tensor.scalar_type(), parameter.tensor.requires_grad(),
           parameter.compute_dtype}]
        .push_back(parameter);
  }
  return flats;
}

at::ScalarType dtype_or(std::optional<at::ScalarType> chosen,
                        at::ScalarType own) {
  return chosen && at::isFloatingType(own) ? *chosen : own;
}

// Shard group of operators before connect_units(); uses the user's group.
class UserGroup final : public ShardGroup {
 public:
  UserGroup(Group group, int num_shards)
      : group_(std::move(group)), num_shards_(num_shards) {}

  at::Tensor all_gather(const at::Tensor& values) override {
    const int64_t first = group_->getRank() / num_shards_ * num_shards_;
    return at::stack(all_gather_tensors(group_, values.contiguous(),
                                        "could not gather a sharded tensor"))
        .narrow(0, first, num_shards_);
  }

 private:
  const Group group_;
  const int num_shards_;
};

UnitSettings settings_of(const UnitRequest& request,
                         const FullyShardOptions& options) {
  UnitSettings settings;
  auto after_forward = options.reshard_after_forward;
  if (request.reshard_after_forward) {
    after_forward = *request.reshard_after_forward;
  } else if (request.spans_segments) {
    after_forward = false;
  } else if (request.mesh && std::holds_alternative<int>(after_forward)) {
    after_forward = true;  // the number applies to the model's mesh only
  }
  if (const int* const number = std::get_if<int>(&after_forward)) {
    settings.reshard_to = *number;
  } else {
    settings.reshard_after_forward = std::get<bool>(after_forward);
  }
  settings.spans_segments = request.spans_segments;
  return settings;
}

std::span<const char> bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided ||
      !tensor.has_storage()) {
    return {};
  }
  const auto* const data =
      static_cast<const char*>(tensor.storage()
                                   .unsafeGetStorageImpl()
                                   ->_mutable_data_ptr_no_checks()
                                   .get());
  if (data == nullptr) return {};
  return {data + tensor.storage_offset() * tensor.element_size(),
          at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                           tensor.itemsize())};
}

}  // namespace

const std::string* ParameterMemory::take(const at::Tensor& tensor,
                                         std::string owner) {
  if (const std::string* const other = owner_of(tensor)) return other;
  const auto bytes = bytes_of(tensor);
  if (!bytes.empty()) {
    by_begin_[bytes.data()] = {.end = bytes.data() + bytes.size(),
                               .owner = std::move(owner)};
  }
  return nullptr;
}

const std::string* ParameterMemory::owner_of(const at::Tensor& tensor) const {
  const auto bytes = bytes_of(tensor);
  // Owned ranges are disjoint: only the last that begins before the end of
  // `bytes` can overlap.
  auto last = by_begin_.lower_bound(bytes.data() + bytes.size());
  if (bytes.empty() || last == by_begin_.begin()) return nullptr;
  --last;
  return last->second.end > bytes.data() ? &last->second.owner : nullptr;
}

std::vector<ShardedUnit> make_sharded_units(std::vector<UnitRequest> requests,
                                            const Group& group,
                                            const FullyShardOptions& options) {
  if (!requests.empty() && !requests.front().parameters.empty() &&
      requests.front().parameters.front().tensor.defined()) {
    suggest_control_device(group,
                           requests.front().parameters.front().tensor.device());
  }
  require_equal_requests(group, requests, options);
  std::vector<MeshRequest> meshes;
  for (const UnitRequest& unit : requests) {
    meshes.push_back(
        {.unit = unit.name, .mesh = unit.mesh, .hash = hash_of_names(unit)});
  }
  number_meshes(group, meshes);
  if (options.broadcast_parameters) {
    broadcast_parameters(group, requests, meshes);
  }
  std::vector<ShardedUnit> units;
  for (const UnitRequest& request : requests) {
    const auto& mesh = request.mesh;
    const int place =
        mesh ? mesh->index_of(group->getRank()) : group->getRank();
    const int num_shards = mesh ? mesh->shard_group_size()
                                : options.num_shards.value_or(group->getSize());
    ShardedUnit unit;
    unit.name = request.name;
    unit.settings = settings_of(request, options);
    unit.comm_hook = options.comm_hook;
    unit.parent = request.parent;
    unit.mesh = request.mesh;
    unit.mesh_hash = hash_of_names(request);
    unit.is_first_replica = place < num_shards;
    const auto of_user =
        mesh ? nullptr : std::make_shared<UserGroup>(group, num_shards);
    for (auto& [kind, parameters] : flats_of(request)) {
      const auto& [dtype, is_trained, compute_dtype] = kind;
      unit.flats.push_back(std::make_unique<FlatShard>(
          std::move(parameters),
          FlatShard::Context{
              .num_ranks = num_shards,
              .rank = place % num_shards,
              .compute_dtype = dtype_or(
                  compute_dtype ? compute_dtype : options.param_dtype, dtype),
              .reduce_dtype = dtype_or(options.reduce_dtype, dtype),
              .group = of_user}));
    }
    for (const UnitParameter& parameter : request.parameters) {
      unit.parameters.push_back(parameter.tensor);
    }
    units.push_back(std::move(unit));
  }
  return units;
}

std::unique_ptr<ShardMeshes> connect_units(std::vector<ShardedUnit>& units,
                                           const Group& group,
                                           const FullyShardOptions& options,
                                           ParameterOwner& owner) {
  std::vector<MeshRequest> meshes;
  for (const ShardedUnit& unit : units) {
    meshes.push_back({.unit = unit.name,
                      .mesh = unit.mesh,
                      .hash = unit.mesh_hash,
                      .gather_size = unit.settings.reshard_to});
  }
  number_meshes(group, meshes);
  absl::Status status;
  try {  // parameters may have left the meta device since
    for (const ShardedUnit& unit : units) {
      for (const auto& flat : unit.flats) flat->adopt_pieces();
    }
  } catch (...) {
    status =
        absl::FailedPreconditionError(message_of(std::current_exception()));
  }
  require_agreement(group, "fully_shard: parameter", {}, status);
  TORCH_CHECK_VALUE(!units.empty(),
                    "fully_shard: the module has no parameters.\n"
                    "Shard a module that has some.");
  const c10::Device device = units.front().flats.front()->device();
  TORCH_CHECK(!device.is_meta(),
              "fully_shard: parameters are on the meta device.\nCall "
              "to_empty(device=...) and initialize them before the first "
              "forward.");
  auto connected = std::make_unique<ShardMeshes>(
      group, options.num_shards.value_or(group->getSize()), device, meshes,
      options.reproducible);
  size_t number = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    units[i].mesh_number = meshes[i].number;
    const ShardMeshes::Mesh& mesh = connected->of(meshes[i].number);
    units[i].transport = mesh.transport.get();
    units[i].uses.emplace(device);
    for (const auto& flat : units[i].flats) {
      flat->belong_to(&owner, mesh.shard_group, i, number);
      number += flat->parameters().size();
    }
  }
  return connected;
}

}  // namespace brigade
