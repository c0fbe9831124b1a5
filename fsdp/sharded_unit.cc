#include "brigade/fsdp/sharded_unit.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/subgroup.h"
#include "brigade/fsdp/shard_transport.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Requests = std::vector<UnitRequest>;

// ---- What ranks must have alike.

std::string dtype_or_own(const std::optional<at::ScalarType>& dtype) {
  return dtype ? c10::toString(*dtype) : "own";
}

std::string describe(const std::variant<bool, int>& reshard_after_forward) {
  return std::visit([](auto value) { return absl::StrCat(value); },
                    reshard_after_forward);
}

std::string describe(const FullyShardOptions& options) {
  return absl::StrCat(
      "options of fully_shard: num_shards ",
      options.num_shards ? absl::StrCat(*options.num_shards) : "all",
      ", reshard_after_forward ", describe(options.reshard_after_forward),
      ", prefetch_depth ", options.prefetch_depth, ", param_dtype ",
      dtype_or_own(options.param_dtype), ", output_dtype ",
      dtype_or_own(options.output_dtype), ", reduce_dtype ",
      dtype_or_own(options.reduce_dtype), ", broadcast_parameters ",
      options.broadcast_parameters, ", reproducible ", options.reproducible,
      ", max_unconfirmed_iterations ", options.max_unconfirmed_iterations,
      ", comm_hook ",
      options.comm_hook ? options.comm_hook->hook_name() : "none");
}

std::string describe(const UnitRequest& unit, const UnitParameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  // On other meshes names differ.
  std::string text = unit.mesh ? "unit with a mesh of its own"
                               : absl::StrCat("unit '", unit.name, "'");
  if (unit.parent) absl::StrAppend(&text, " (in unit ", *unit.parent, ")");
  if (unit.reshard_after_forward) {
    absl::StrAppend(&text, " (reshards ", describe(*unit.reshard_after_forward),
                    ")");
  }
  if (unit.spans_segments) absl::StrAppend(&text, " (spans segments)");
  absl::StrAppend(&text, ": ");
  if (!unit.mesh) absl::StrAppend(&text, "'", parameter.name, "' ");
  if (parameter.block_numel != 1) {
    absl::StrAppend(&text, "in blocks of ", parameter.block_numel, " ");
  }
  if (parameter.compute_dtype) {
    absl::StrAppend(&text, "computed in ",
                    c10::toString(*parameter.compute_dtype), " ");
  }
  if (tensor.defined() && !tensor.requires_grad()) {
    absl::StrAppend(&text, "frozen ");
  }
  return text +
         (tensor.defined()
              ? c10::str(tensor.device().type(), ' ', tensor.scalar_type(), ' ',
                         tensor.sizes(), ' ', tensor.strides())
              : "undefined");
}

absl::Status check_reshard(const std::variant<bool, int>& after_forward,
                           int num_shards) {
  const int* const found = std::get_if<int>(&after_forward);
  if (found == nullptr ||
      (*found > 1 && *found < num_shards && num_shards % *found == 0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "fully_shard: expected reshard_after_forward to be a bool, or a number "
      "of ranks that is more than 1, less than the number of shards, ",
      num_shards, ", and divides it, found ", *found,
      ".\nGive the ranks of a host, or true."));
}

absl::Status check_options(const FullyShardOptions& options, int num_ranks) {
  if (options.num_shards &&
      (*options.num_shards < 1 || num_ranks % *options.num_shards != 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fully_shard: expected num_shards to divide the number of ranks, ",
        num_ranks, ", found ", *options.num_shards,
        ".\nGive the ranks of a host, or leave it out for all."));
  }
  if (options.max_unconfirmed_iterations < 0 ||
      options.max_unconfirmed_iterations > 16) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fully_shard: expected max_unconfirmed_iterations from 0 to 16, found ",
        options.max_unconfirmed_iterations, ".\nGive 1."));
  }
  for (const auto& dtype :
       {options.param_dtype, options.reduce_dtype, options.output_dtype}) {
    if (dtype && !at::isFloatingType(*dtype)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "fully_shard: expected a floating dtype, found ",
          c10::toString(*dtype), ".\nGive bfloat16, for instance."));
    }
  }
  return check_reshard(options.reshard_after_forward,
                       options.num_shards.value_or(num_ranks));
}

// `device`: of the first parameter.
absl::Status check_parameter(const UnitRequest& unit,
                             const UnitParameter& parameter,
                             c10::Device device) {
  const auto refuse = [&](const auto&... words) {
    return absl::InvalidArgumentError(
        absl::StrCat("fully_shard: parameter '", parameter.name, "' of unit '",
                     unit.name, "' ", words...));
  };
  const at::Tensor& tensor = parameter.tensor;
  if (!tensor.defined()) return refuse("is undefined.");
  if (tensor.device() != device) {
    return refuse("is on ", tensor.device().str(), ", the first one on ",
                  device.str(), ".\nMove the module to one device.");
  }
  if (shard_of(tensor) != nullptr) {
    return refuse("is sharded already.\nShard each parameter once.");
  }
  if (tensor.layout() != at::kStrided ||
      !tensor.is_non_overlapping_and_dense()) {
    return refuse("is not dense.\nUse a dense parameter.");
  }
  if (parameter.block_numel < 1) {
    return refuse("is not to be cut in blocks of ", parameter.block_numel,
                  " elements.\nGive 1, or the length of a row, for instance.");
  }
  if (parameter.compute_dtype &&
      !at::isFloatingType(*parameter.compute_dtype)) {
    return refuse("can't be computed in ",
                  c10::toString(*parameter.compute_dtype),
                  ".\nGive bfloat16, for instance.");
  }
  if (!tensor.is_leaf()) {
    return refuse(
        "was computed from others.\nShard the parameters of a "
        "module, which are leaves.");
  }
  return absl::OkStatus();
}

absl::Status check_units(const c10d::ProcessGroup& group,
                         const Requests& requests, int num_shards) {
  ParameterMemory memory;
  std::optional<c10::Device> device;
  for (const UnitRequest& unit : requests) {
    if (unit.parameters.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("fully_shard: unit '", unit.name,
                       "' has no parameters.\nMake a unit of a module that "
                       "has some of its own."));
    }
    absl::Status status =
        check_reshard(unit.reshard_after_forward.value_or(true),
                      unit.mesh ? unit.mesh->row_length() : num_shards);
    for (const UnitParameter& parameter : unit.parameters) {
      if (!device && parameter.tensor.defined()) {
        device = parameter.tensor.device();
      }
      status.Update(
          check_parameter(unit, parameter, device.value_or(at::kCPU)));
      if (!status.ok()) return status;
      if (!device->is_meta() && !supports_device(group, device->type())) {
        return absl::InvalidArgumentError(absl::StrCat(
            "fully_shard: parameter '", parameter.name, "' of unit '",
            unit.name, "' is on ", device->str(),
            ", for which the group has no backend.\n"
            "Move the module to the group's device before it is sharded."));
      }
      const std::string* const owner = memory.take(
          parameter.tensor,
          absl::StrCat("'", parameter.name, "' of unit '", unit.name, "'"));
      if (owner == nullptr || parameter.tensor.is_meta()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("fully_shard: parameter '", parameter.name,
                       "' of unit '", unit.name, "' shares its memory with ",
                       *owner, ".\nPut tied parameters into one unit, once."));
    }
  }
  return absl::OkStatus();
}

void require_alike(const Group& group, const Requests& requests,
                   const FullyShardOptions& options) {
  absl::Status status = check_options(options, group->getSize());
  if (status.ok()) {
    status = check_units(*group, requests,
                         options.num_shards.value_or(group->getSize()));
  }
  std::vector<std::string> items = {describe(options)};
  for (const UnitRequest& unit : requests) {
    for (const UnitParameter& parameter : unit.parameters) {
      items.push_back(describe(unit, parameter));
    }
  }
  require_agreement(group, "sharded parameter", items, status);
}

// ---- Meshes.

// Of what ranks of one mesh have alike, and others need not.
uint64_t hash_of_names(const UnitRequest& unit) {
  size_t hash = std::hash<std::string>{}(unit.name);
  for (const UnitParameter& parameter : unit.parameters) {
    hash = c10::hash_combine(hash, std::hash<std::string>{}(parameter.name));
  }
  return hash;
}

// From the first rank of each unit's mesh.
void broadcast_parameters(const Group& group, const Requests& requests,
                          const std::vector<MeshRequest>& meshes) {
  const at::NoGradGuard no_grad;
  std::map<size_t, std::unique_ptr<GroupScope>> scopes;
  for (size_t i = 0; i < requests.size(); ++i) {
    const UnitRequest& unit = requests[i];
    Group of_mesh = group;
    if (meshes[i].number > 0) {
      auto& scope = scopes[meshes[i].number];
      if (!scope) {
        scope.reset(new GroupScope(make_subgroup(
            group, unit.mesh->ranks, unit.parameters.front().tensor.device())));
      }
      of_mesh = scope->group();
    }
    if (of_mesh->getSize() == 1) continue;
    for (const UnitParameter& parameter : unit.parameters) {
      if (parameter.tensor.numel() == 0 || parameter.tensor.is_meta()) continue;
      const at::Tensor values = parameter.tensor.detach();
      std::vector<at::Tensor> sent = {values.contiguous()};
      of_mesh->broadcast(sent)->wait();
      if (!values.is_same(sent.front())) values.copy_(sent.front());
    }
  }
}

// ---- Units.

// Groups parameters by dtype and by compute dtype, frozen ones apart, so that
// no zeros travel for them.
std::vector<std::vector<size_t>> flats_of(const UnitRequest& unit) {
  std::vector<std::vector<size_t>> flats;
  const auto kind = [&](size_t i) {
    const UnitParameter& parameter = unit.parameters[i];
    return std::tuple(parameter.tensor.scalar_type(),
                      parameter.tensor.requires_grad(),
                      parameter.compute_dtype);
  };
  for (size_t i = 0; i < unit.parameters.size(); ++i) {
    const auto found =
        std::ranges::find_if(flats, [&](const std::vector<size_t>& flat) {
          return kind(flat.front()) == kind(i);
        });
    if (found == flats.end()) {
      flats.push_back({i});
    } else {
      found->push_back(i);
    }
  }
  return flats;
}

at::ScalarType dtype_or(std::optional<at::ScalarType> chosen,
                        at::ScalarType own) {
  return chosen && at::isFloatingType(own) ? *chosen : own;
}

// Until connect_units(): collectives of operators on the user's group.
class UserGroup final : public ShardGroup {
 public:
  UserGroup(Group group, int num_shards)
      : group_(std::move(group)), num_shards_(num_shards) {}

  at::Tensor all_gather(const at::Tensor& values) override {
    std::vector<std::vector<at::Tensor>> found(1);
    std::vector<at::Tensor> sent = {values.contiguous()};
    for (int rank = 0; rank < group_->getSize(); ++rank) {
      found.front().push_back(at::empty_like(sent.front()));
    }
    group_->allgather(found, sent)->wait();
    const int64_t first = group_->getRank() / num_shards_ * num_shards_;
    return at::stack(found.front()).narrow(0, first, num_shards_);
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
    after_forward = true;  // the number is one of the model's mesh
  }
  if (const int* const number = std::get_if<int>(&after_forward)) {
    settings.reshards_to = *number;
  } else {
    settings.reshards_after_forward = std::get<bool>(after_forward);
  }
  settings.spans_segments = request.spans_segments;
  return settings;
}

struct Interval {
  const void* storage = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

// None for a tensor without memory of its own.
std::optional<Interval> interval_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided ||
      tensor.is_meta() || tensor.numel() == 0 || !tensor.has_storage()) {
    return std::nullopt;
  }
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const int64_t begin = tensor.storage_offset();
  return Interval{.storage = tensor.storage().unsafeGetStorageImpl(),
                  .begin = begin * tensor.element_size(),
                  .end = (begin + last + 1) * tensor.element_size()};
}

}  // namespace

const std::string* ParameterMemory::take(const at::Tensor& tensor,
                                         std::string owner) {
  if (const std::string* const other = owner_of(tensor)) return other;
  if (const auto interval = interval_of(tensor)) {
    by_storage_[interval->storage].emplace(
        interval->begin,
        Owned{.end = interval->end, .owner = std::move(owner)});
  }
  return nullptr;
}

const std::string* ParameterMemory::owner_of(const at::Tensor& tensor) const {
  const auto interval = interval_of(tensor);
  if (!interval) return nullptr;
  const auto found = by_storage_.find(interval->storage);
  if (found == by_storage_.end()) return nullptr;
  // They don't overlap: the last that begins before this one ends decides.
  auto last = found->second.lower_bound(interval->end);
  if (last == found->second.begin()) return nullptr;
  --last;
  return last->second.end > interval->begin ? &last->second.owner : nullptr;
}

int64_t ShardedUnit::whole_bytes() const {
  int64_t bytes = 0;
  for (const auto& flat : flats) bytes += flat->whole_bytes();
  return bytes;
}

int64_t ShardedUnit::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& flat : flats) {
    if (flat->is_trained()) bytes += flat->gradient_bytes();
  }
  return bytes;
}

bool ShardedUnit::is_trained() const {
  return std::ranges::any_of(
      flats, [](const auto& flat) { return flat->is_trained(); });
}

bool ShardedUnit::sums_over_replicas() const {
  return settings.sums_over_replicas || transport->num_replicas() == 1;
}

double ShardedUnit::divisor() const {
  return settings.gradient_divisor.value_or(transport->num_shards() *
                                            transport->num_replicas());
}

void ShardedUnit::bind() {
  if (std::exchange(is_bound, true)) return;
  for (size_t i = 0; i < flats.size(); ++i) flats[i]->bind(gathered->wholes[i]);
}

void ShardedUnit::unbind() {
  if (!std::exchange(is_bound, false)) return;
  for (const auto& flat : flats) flat->unbind();
}

std::vector<ShardedUnit> make_sharded_units(std::vector<UnitRequest> requests,
                                            const Group& group,
                                            const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(group,
                    "fully_shard: the process group is null.\nGive that of "
                    "init_process_group().");
  if (!requests.empty() && !requests.front().parameters.empty() &&
      requests.front().parameters.front().tensor.defined()) {
    suggest_control_device(group,
                           requests.front().parameters.front().tensor.device());
  }
  require_alike(group, requests, options);
  std::vector<MeshRequest> meshes;
  for (const UnitRequest& unit : requests) {
    meshes.push_back(
        {.unit = unit.name, .mesh = unit.mesh, .hash = hash_of_names(unit)});
  }
  number_meshes(group, meshes);
  if (options.broadcast_parameters) {
    broadcast_parameters(group, requests, meshes);
  }
  const UnitMesh of_model = {.ranks = row_of(0, group->getSize()),
                             .num_shards = options.num_shards};
  std::vector<ShardedUnit> units;
  for (const UnitRequest& request : requests) {
    const UnitMesh& mesh = request.mesh ? *request.mesh : of_model;
    const int place = mesh.place_of(group->getRank());
    ShardedUnit unit;
    unit.name = request.name;
    unit.settings = settings_of(request, options);
    unit.comm_hook = options.comm_hook;
    unit.parent = request.parent;
    unit.mesh = request.mesh;
    unit.mesh_hash = hash_of_names(request);
    unit.is_first_replica = place < mesh.row_length();
    const auto of_user =
        request.mesh ? nullptr
                     : std::make_shared<UserGroup>(group, mesh.row_length());
    for (const std::vector<size_t>& members : flats_of(request)) {
      std::vector<UnitParameter> parameters;
      for (const size_t i : members) {
        parameters.push_back(request.parameters[i]);
      }
      const at::ScalarType dtype = parameters.front().tensor.scalar_type();
      const auto compute_dtype = parameters.front().compute_dtype
                                     ? parameters.front().compute_dtype
                                     : options.param_dtype;
      unit.flats.push_back(std::make_unique<FlatShard>(
          std::move(parameters),
          FlatShard::Context{
              .num_ranks = mesh.row_length(),
              .rank = place % mesh.row_length(),
              .compute_dtype = dtype_or(compute_dtype, dtype),
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
                      .neighbours = unit.settings.reshards_to});
  }
  number_meshes(group, meshes);
  absl::Status status;
  try {  // what was on meta may have been given memory since
    for (const ShardedUnit& unit : units) {
      for (const auto& flat : unit.flats) flat->adopt_pieces();
    }
  } catch (...) {
    status =
        absl::FailedPreconditionError(message_of(std::current_exception()));
  }
  const std::vector<std::string> nothing;
  require_agreement(group, "sharded parameter", nothing, status);
  std::optional<c10::Device> device;
  for (const ShardedUnit& unit : units) {
    if (!device && !unit.flats.empty()) device = unit.flats.front()->device();
  }
  TORCH_CHECK_VALUE(device,
                    "fully_shard: the module has no parameters.\n"
                    "Shard one that has some.");
  TORCH_CHECK(!device->is_meta(),
              "fully_shard: parameters are on meta.\nCall to_empty() and give "
              "them values before the first forward.");
  auto connected = std::make_unique<ShardMeshes>(
      group, options.num_shards.value_or(group->getSize()), *device, meshes,
      options.reproducible);
  size_t number = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    units[i].mesh_number = meshes[i].number;
    const ShardMeshes::Mesh& mesh = connected->of(meshes[i].number);
    units[i].transport = mesh.transport.get();
    units[i].uses.emplace(*device);
    for (const auto& flat : units[i].flats) {
      flat->belong_to(&owner, mesh.row, i, number);
      number += flat->parameters().size();
    }
  }
  return connected;
}

}  // namespace brigade
