#include "brigade/fsdp/shard_transport.h"

#include <ATen/ATen.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/ordered/ordered_collectives.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Bytes that one rank sends in a ring reduce-scatter or all-gather of `whole`.
int64_t bytes_by_ring(const at::Tensor& whole, int num_ranks) {
  return static_cast<int64_t>(whole.nbytes()) / num_ranks * (num_ranks - 1);
}

// Return the ranks of `rank`'s shard group and replica group, in rising order.
std::vector<int> shard_group_ranks(int rank, int num_shards) {
  std::vector<int> ranks(num_shards);
  std::iota(ranks.begin(), ranks.end(), rank / num_shards * num_shards);
  return ranks;
}

std::vector<int> replica_group_ranks(int rank, int num_shards, int num_ranks) {
  std::vector<int> ranks;
  for (int r = rank % num_shards; r < num_ranks; r += num_shards) {
    ranks.push_back(r);
  }
  return ranks;
}

}  // namespace

ShardTransport::ShardTransport(const Group& group, int num_shards,
                               const ShardingStreams& streams)
    : num_shards_(num_shards),
      num_replicas_(group->getSize() / num_shards),
      shard_rank_(group->getRank() % num_shards),
      streams_(streams) {}

ShardTransport::FuturePtr ShardTransport::all_gather(const at::Tensor& whole,
                                                     int num_ranks) {
  sent_.by_gathers += bytes_by_ring(whole, num_ranks);
  return launch_all_gather(whole, num_ranks);
}

ShardTransport::FuturePtr ShardTransport::reduce_scatter(
    const at::Tensor& whole, const at::Tensor& shard,
    const ReduceOptions& options) {
  sent_.by_sums += bytes_by_ring(whole, num_shards_);
  if (options.over_replicas) {
    sent_.by_sums += 2 * bytes_by_ring(shard, num_replicas_);
  }
  return launch_reduce_scatter(whole, shard, options);
}

namespace {

class CpuTransport final : public ShardTransport {
 public:
  CpuTransport(const Group& group, int num_shards,
               const std::set<int>& gather_sizes)
      : ShardTransport(group, num_shards, ShardingStreams(at::kCPU)) {
    const int rank = group->getRank();
    const auto subgroup = [&](const std::vector<int>& ranks) -> const Group& {
      scopes_.emplace_back(new GroupScope(make_subgroup(group, ranks)));
      return scopes_.back()->group();
    };
    Group shard_group = group;
    if (num_replicas() > 1) {
      shard_group = subgroup(shard_group_ranks(rank, num_shards));
      replica_reductions_.emplace(
          subgroup(replica_group_ranks(rank, num_shards, group->getSize())));
    }
    shard_reductions_ = std::make_shared<OrderedCollectives>(shard_group);
    gathers_.try_emplace(num_shards, shard_group);
    for (const int size : gather_sizes) {
      gathers_.try_emplace(size, subgroup(shard_group_ranks(rank, size)));
    }
  }

  bool scales() const override { return true; }

  void close_groups() noexcept override {
    for (const auto& scope : scopes_) close_group(*scope->group());
  }

 private:
  FuturePtr launch_all_gather(const at::Tensor& whole, int num_ranks) override {
    return gathers_.at(num_ranks).all_gather(whole);
  }

  FuturePtr launch_reduce_scatter(const at::Tensor& whole,
                                  const at::Tensor& shard,
                                  const ReduceOptions& options) override {
    // Scaled before it is rounded where no other reduction follows.
    if (!options.over_replicas || !replica_reductions_) {
      return shard_reductions_->reduce_scatter(whole, shard, options.scale);
    }
    FuturePtr partial = shard_reductions_->reduce_scatter(whole, shard);
    if (options.partial_sum.defined()) {
      partial = partial->then(
          [shard, earlier = options.partial_sum](c10::ivalue::Future& done) {
            const at::NoGradGuard no_grad;
            c10::IValue value = done.value();  // throws the reduction's error
            shard.add_(earlier);
            return value;
          },
          partial->elementType());
    }
    const FuturePtr total =
        replica_reductions_->all_reduce(shard, options.scale, partial);
    // Ends the shard group's reductions too, so that none of its ranks waits
    // for this one.
    total->addCallback([shard_reductions = std::weak_ptr(shard_reductions_)](
                           c10::ivalue::Future& done) {
      if (!done.hasError()) return;
      if (const auto alive = shard_reductions.lock()) {
        alive->abort(done.exception_ptr());
      }
    });
    return total;
  }

  std::vector<std::unique_ptr<GroupScope>> scopes_;
  std::map<int, OrderedCollectives> gathers_;  // by number of ranks
  // None: one shard group. Waits for futures of shard_reductions_, so is
  // destroyed after it.
  std::optional<OrderedCollectives> replica_reductions_;
  std::shared_ptr<OrderedCollectives> shard_reductions_;
};

class DeviceTransport final : public ShardTransport {
 public:
  DeviceTransport(const Group& group, int num_shards,
                  const ShardingStreams& streams, std::set<int> gather_sizes,
                  bool in_order)
      : ShardTransport(group, num_shards, streams),
        shard_group_(make_subgroup(
            group, shard_group_ranks(group->getRank(), num_shards),
            streams.device())),
        replica_group_(make_subgroup(
            group,
            replica_group_ranks(group->getRank(), num_shards, group->getSize()),
            streams.device())),
        in_order_(in_order),
        is_over_gloo_(
            is_over_gloo(*shard_group_.group(), streams.device().type())) {
    gather_sizes.insert(num_shards);
    for (const int size : gather_sizes) {
      gathers_[size].reset(new GroupScope(make_subgroup(
          group, shard_group_ranks(group->getRank(), size), streams.device())));
    }
  }

  bool scales() const override { return in_order_; }

  void close_groups() noexcept override {
    const auto close = [](const GroupScope& scope) {
      if (scope.group()->getSize() > 1) close_group(*scope.group());
    };
    close(shard_group_);
    close(replica_group_);
    for (const auto& [size, scope] : gathers_) close(*scope);
  }

 private:
  FuturePtr launch_all_gather(const at::Tensor& whole, int num_ranks) override {
    const Group& group = gathers_.at(num_ranks)->group();
    const int64_t numel = whole.numel() / num_ranks;
    return all_gather_into(*group, whole,
                           whole.narrow(0, group->getRank() * numel, numel))
        ->getFuture();
  }

  FuturePtr launch_reduce_scatter(const at::Tensor& whole,
                                  const at::Tensor& shard,
                                  const ReduceOptions& options) override {
    if (in_order_) return reduce_in_rank_order(whole, shard, options);
    FuturePtr partial;
    if (is_over_gloo_) {  // its reduce-scatter has no future: the host waits
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> tensors = {whole};
      wait_on_current_stream(shard_group_.group()->allreduce(tensors));
      shard.copy_(whole.narrow(0, shard_rank() * shard.numel(), shard.numel()));
      partial = completed_future({shard});
    } else {
      partial =
          reduce_scatter_into(*shard_group_.group(), shard, whole)->getFuture();
    }
    if (!options.over_replicas || num_replicas() == 1) return partial;
    partial->waitAndThrow();  // only the stream waits
    if (options.partial_sum.defined()) {
      const at::NoGradGuard no_grad;
      shard.add_(options.partial_sum);
    }
    std::vector<at::Tensor> tensors = {shard};
    return replica_group_.group()->allreduce(tensors)->getFuture();
  }

  // Runs on the current stream, after the collectives. Rounds to the dtype of
  // `shard` before each send, as the CPU transport does.
  FuturePtr reduce_in_rank_order(const at::Tensor& whole,
                                 const at::Tensor& shard,
                                 const ReduceOptions& options) {
    const at::NoGradGuard no_grad;
    // Allocates before the first launch: short memory fails on this rank alone.
    const bool has_replicas = options.over_replicas && num_replicas() > 1;
    const at::Tensor parts = num_shards() > 1 ? at::empty_like(whole) : whole;
    const at::Tensor total = empty_sum(shard.numel(), shard);
    const at::Tensor of_replicas =
        has_replicas
            ? at::empty({num_replicas() * shard.numel()}, shard.options())
            : at::Tensor();
    if (num_shards() > 1) {
      wait_on_current_stream(
          all_to_all_into(*shard_group_.group(), parts, whole));
    }
    sum_in_order(parts, num_shards(), total);
    if (has_replicas) {
      shard.copy_(total);
      if (options.partial_sum.defined()) shard.add_(options.partial_sum);
      wait_on_current_stream(
          all_gather_into(*replica_group_.group(), of_replicas, shard));
      sum_in_order(of_replicas, num_replicas(), total);
    }
    if (options.scale != 1) total.mul_(options.scale);
    shard.copy_(total);
    return completed_future({shard});
  }

  std::map<int, std::unique_ptr<GroupScope>> gathers_;  // by number of ranks
  const GroupScope shard_group_;
  const GroupScope replica_group_;
  const bool in_order_;
  const bool is_over_gloo_;
};

}  // namespace

std::unique_ptr<ShardTransport> make_ordered_transport(
    const Group& group, int num_shards, const std::set<int>& gather_sizes) {
  return std::make_unique<CpuTransport>(group, num_shards, gather_sizes);
}

std::unique_ptr<ShardTransport> make_device_transport(
    const Group& group, int num_shards, const ShardingStreams& streams,
    const std::set<int>& gather_sizes, bool in_order) {
  return std::make_unique<DeviceTransport>(group, num_shards, streams,
                                           gather_sizes, in_order);
}

// ---- Meshes.

namespace {

absl::Status check_mesh(const MeshRequest& unit, int rank, int num_ranks) {
  const UnitMesh& mesh = *unit.mesh;
  const auto error = [&](const auto&... words) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fully_shard: the mesh of ", describe_unit(unit.unit), ": ", words...));
  };
  const auto& ranks = mesh.ranks;
  const bool rises =
      std::ranges::adjacent_find(ranks, std::greater_equal<>()) == ranks.end();
  if (ranks.empty() || !rises || ranks.front() < 0 ||
      ranks.back() >= num_ranks || mesh.index_of(rank) < 0) {
    return error(
        "expected ascending ranks of the model's process group (world "
        "size ",
        num_ranks, ") that include rank ", rank, ", found [",
        absl::StrJoin(ranks, ", "),
        "].\nList the ranks that hold the same parameters as this "
        "rank.");
  }
  if (mesh.shard_group_size() < 1 ||
      mesh.size() % mesh.shard_group_size() != 0) {
    return error("expected num_shards to divide the mesh's size, ", mesh.size(),
                 ", found ", mesh.shard_group_size(),
                 ".\nOmit num_shards to shard over the whole mesh.");
  }
  return absl::OkStatus();
}

// Without the unit's name if it has its own mesh: ranks of different meshes may
// hold different units.
std::string describe_mesh_of(const MeshRequest& unit) {
  if (!unit.mesh) return absl::StrCat("'", unit.unit, "': on the model's mesh");
  return absl::StrCat("a unit on a mesh of ", unit.mesh->size(),
                      " ranks in shard groups of ",
                      unit.mesh->shard_group_size());
}

// `hashes`: each rank's two hashes of this unit, of the mesh's ranks and of the
// parameter names. `stride`: distance between ranks.
absl::Status check_peers(const MeshRequest& unit, int rank,
                         std::span<const int64_t> hashes, size_t stride) {
  for (const int peer : unit.mesh->ranks) {
    const std::string found =
        absl::StrCat(" on ", describe(*unit.mesh), "; rank ", rank,
                     " and rank ", peer, " differ.\n");
    if (hashes[peer * stride] != hashes[rank * stride]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "fully_shard: the mesh of ", describe_unit(unit.unit),
          ": expected the same mesh", found,
          "Put each rank of the model into one mesh of the unit."));
    }
    if (hashes[peer * stride + 1] != hashes[rank * stride + 1]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "fully_shard: ", describe_unit(unit.unit),
          ": expected the same parameter names in the same order", found,
          "Call fully_shard() on the same modules in the same order on all "
          "ranks of a mesh."));
    }
  }
  return absl::OkStatus();
}

std::unique_ptr<ShardTransport> make_transport(
    const Group& group, int num_shards, const ShardingStreams& streams,
    const std::set<int>& gather_sizes, bool in_order) {
  if (streams.device().is_cpu() &&
      (group->getSize() == 1 || has_peers(*group))) {
    return make_ordered_transport(group, num_shards, gather_sizes);
  }
  return make_device_transport(group, num_shards, streams, gather_sizes,
                               in_order);
}

class TransportShardGroup final : public ShardGroup {
 public:
  TransportShardGroup(std::weak_ptr<ShardTransport> transport,
                      bool is_everywhere)
      : ShardGroup(is_everywhere), transport_(std::move(transport)) {}

  at::Tensor all_gather(const at::Tensor& values) override {
    const auto transport = transport_.lock();
    TORCH_CHECK(transport != nullptr,
                "fully_shard: expected the model of a sharded tensor to exist "
                "when an operator gathers the tensor; it was destroyed.\nKeep "
                "the model.");
    const at::NoGradGuard no_grad;
    const int64_t numel = values.numel();
    const int num_ranks = transport->num_shards();
    if (num_ranks == 1) return values.reshape({1, numel});
    const StreamPoint values_written = StreamPoint::now(values.device());
    at::Tensor all;
    ShardTransport::FuturePtr gathered;
    {
      const auto on_gathers = transport->streams().for_gathers();
      values_written.wait();
      all = at::empty({num_ranks * numel}, values.options());
      all.narrow(0, transport->shard_rank() * numel, numel).copy_(values);
      gathered = transport->all_gather(all, num_ranks);
    }
    gathered->waitAndThrow();
    record_use(all);
    return all.view({num_ranks, numel});
  }

 private:
  const std::weak_ptr<ShardTransport> transport_;
};

}  // namespace

int UnitMesh::index_of(int rank) const {
  const auto found = std::ranges::find(ranks, rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

std::string describe(const UnitMesh& mesh) {
  return absl::StrCat(
      "ranks ", absl::StrJoin(mesh.ranks, ", "),
      mesh.shard_group_size() == mesh.size()
          ? ""
          : absl::StrCat(" in shard groups of ", mesh.shard_group_size()));
}

void number_meshes(const Group& group, std::span<MeshRequest> units) {
  const int rank = group->getRank();
  std::vector<std::string> described;
  std::vector<MeshRequest*> meshed;
  std::vector<int64_t> hashes;  // by mesh: of its ranks, of parameter names
  absl::Status status;
  for (MeshRequest& unit : units) {
    described.push_back(describe_mesh_of(unit));
    if (!unit.mesh) continue;
    status.Update(check_mesh(unit, rank, group->getSize()));
    meshed.push_back(&unit);
    hashes.push_back(static_cast<int64_t>(c10::get_hash(unit.mesh->ranks)));
    hashes.push_back(static_cast<int64_t>(unit.hash));
  }
  if (meshed.empty()) return;
  require_agreement(group, "fully_shard: unit", described, status);
  const size_t stride = hashes.size();
  if (has_peers(*group)) {
    hashes = all_gather_ints(group, hashes, "could not compare its meshes");
    for (size_t i = 0; i < meshed.size(); ++i) {
      status.Update(check_peers(*meshed[i], rank,
                                std::span(hashes).subspan(2 * i), stride));
    }
  }
  require_agreement(group, "fully_shard: unit", {}, status);

  // Key: the mesh of each rank, and the number of shards.
  std::map<std::pair<std::vector<int64_t>, int>, size_t> numbers;
  for (size_t i = 0; i < meshed.size(); ++i) {
    std::vector<int64_t> mesh_by_rank;
    for (size_t k = 2 * i; k < hashes.size(); k += stride) {
      mesh_by_rank.push_back(hashes[k]);
    }
    const int num_shards = meshed[i]->mesh->shard_group_size();
    meshed[i]->number = numbers
                            .try_emplace({std::move(mesh_by_rank), num_shards},
                                         numbers.size() + 1)
                            .first->second;
  }
}

ShardMeshes::ShardMeshes(const Group& group, int num_shards, c10::Device device,
                         std::span<const MeshRequest> units, bool in_order) {
  std::map<size_t, std::set<int>> gather_sizes;  // by mesh number
  std::map<size_t, UnitMesh> own_meshes;
  for (const MeshRequest& unit : units) {
    std::set<int>& sizes = gather_sizes[unit.number];
    if (unit.gather_size) sizes.insert(*unit.gather_size);
    if (unit.number > 0) own_meshes.emplace(unit.number, *unit.mesh);
  }
  Mesh& root = meshes_.emplace_back(Mesh{.gather_sizes = gather_sizes[0]});
  root.transport = make_transport(group, num_shards, ShardingStreams(device),
                                  root.gather_sizes, in_order);
  root.shard_group =
      std::make_shared<TransportShardGroup>(root.transport, true);
  for (const auto& [number, mesh] : own_meshes) {
    Mesh made = {.gather_sizes = gather_sizes[number]};
    made.scope.reset(new GroupScope(make_subgroup(group, mesh.ranks, device)));
    made.transport =
        make_transport(made.scope->group(), mesh.shard_group_size(), streams(),
                       made.gather_sizes, in_order);
    made.shard_group = std::make_shared<TransportShardGroup>(
        made.transport, mesh.size() == group->getSize());
    meshes_.push_back(std::move(made));
  }
}

ShardTransport::Sent ShardMeshes::sent() const {
  ShardTransport::Sent sent;
  for (const Mesh& mesh : meshes_) {
    sent.by_gathers += mesh.transport->sent().by_gathers;
    sent.by_sums += mesh.transport->sent().by_sums;
  }
  return sent;
}

}  // namespace brigade
