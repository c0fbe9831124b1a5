#include "brigade/fsdp/shard_meshes.h"

#include <ATen/ATen.h>

#include <map>
#include <set>
#include <utility>

#include "brigade/comm/group/group_info.h"
#include "brigade/comm/streams/streams.h"
#include "brigade/comm/subgroup.h"
#include "brigade/fsdp/device_transport.h"
#include "brigade/fsdp/streams.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::unique_ptr<ShardTransport> make_transport(
    const Group& group, int num_shards, const ShardingStreams& streams,
    const std::vector<int>& neighbours, bool in_order) {
  if (!streams.device().is_cpu()) {
    return make_device_transport(group, num_shards, streams, neighbours,
                                 in_order);
  }
  if (group->getSize() > 1 && !has_peers(*group)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        num_shards == group->getSize(), "fully_shard: expected all ",
        group->getSize(),
        " ranks of a group without peers to be one row, found rows of ",
        num_shards, ".\nShard over all of them there.");
    return make_group_transport(group, neighbours);
  }
  return make_ordered_transport(group, num_shards, neighbours);
}

// The ranks of a row, which hold all pieces of a tensor.
class RowGroup final : public ShardGroup {
 public:
  // `is_everywhere`: all ranks of the model hold these parameters.
  RowGroup(ShardTransport& transport, bool is_everywhere)
      : transport_(&transport), is_everywhere_(is_everywhere) {}

  // The transport is gone from here on.
  void close() { transport_ = nullptr; }

  void all_reduce(at::Tensor& values, Op op) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        is_everywhere_,
        "a reduction of a parameter that some ranks don't have: each mesh "
        "would get another result. Use the model's clip_grad_norm(), or "
        "full_tensor().");
    const at::Tensor all = all_gather(values);
    switch (op) {
      case Op::kSum:
        values = all.sum(0);
        break;
      case Op::kMax:
        values = all.amax(0);
        break;
      case Op::kMin:
        values = all.amin(0);
        break;
    }
  }

  at::Tensor all_gather(const at::Tensor& values) override {
    TORCH_CHECK(transport_ != nullptr,
                "fully_shard: a sharded tensor is to be reduced or gathered, "
                "but its model is gone.\nKeep the model.");
    const at::NoGradGuard no_grad;
    const int64_t numel = values.numel();
    const int num_ranks = transport_->num_shards();
    if (num_ranks == 1) return values.reshape({1, numel});
    const StreamPoint made = StreamPoint::now(values.device());
    at::Tensor all;
    ShardTransport::FuturePtr gathered;
    {
      const auto on_gathers = transport_->streams().for_gathers();
      made.wait();
      all = at::empty({num_ranks * numel}, values.options());
      all.narrow(0, transport_->shard_rank() * numel, numel).copy_(values);
      gathered = transport_->all_gather(all);
    }
    gathered->waitAndThrow();
    if (!values.device().is_cpu()) {
      all.record_stream(current_stream(values.device()));
    }
    return all.view({num_ranks, numel});
  }

 private:
  ShardTransport* transport_;
  const bool is_everywhere_;
};

}  // namespace

ShardMeshes::ShardMeshes(const Group& group, int num_shards, c10::Device device,
                         std::span<const MeshRequest> units, bool in_order) {
  std::map<size_t, std::set<int>> neighbours;
  std::map<size_t, UnitMesh> own;
  for (const MeshRequest& unit : units) {
    std::set<int>& of_mesh = neighbours[unit.number];
    if (unit.neighbours) of_mesh.insert(*unit.neighbours);
    if (unit.number > 0) own.emplace(unit.number, *unit.mesh);
  }
  const auto of = [&](size_t number) {
    const std::set<int>& numbers = neighbours[number];
    return std::vector<int>(numbers.begin(), numbers.end());
  };
  Mesh& root = meshes_.emplace_back(Mesh{.neighbours = of(0)});
  root.transport = make_transport(group, num_shards, ShardingStreams(device),
                                  root.neighbours, in_order);
  root.row = std::make_shared<RowGroup>(*root.transport, true);
  for (const auto& [number, mesh] : own) {
    Mesh made = {.neighbours = of(number)};
    made.scope.reset(new GroupScope(make_subgroup(group, mesh.ranks, device)));
    made.transport = make_transport(made.scope->group(), mesh.row_length(),
                                    streams(), made.neighbours, in_order);
    made.row = std::make_shared<RowGroup>(*made.transport,
                                          mesh.size() == group->getSize());
    meshes_.push_back(std::move(made));
  }
}

ShardMeshes::~ShardMeshes() {
  for (const Mesh& mesh : meshes_) static_cast<RowGroup&>(*mesh.row).close();
}

ShardTransport::Sent ShardMeshes::sent() const {
  ShardTransport::Sent sent;
  for (const Mesh& mesh : meshes_) {
    const ShardTransport::Sent of_mesh = mesh.transport->sent();
    sent.by_gathers += of_mesh.by_gathers;
    sent.by_sums += of_mesh.by_sums;
  }
  return sent;
}

std::vector<Group> ShardMeshes::own_groups() const {
  std::vector<Group> groups;
  for (const Mesh& mesh : meshes_) {
    for (auto& own : mesh.transport->own_groups()) groups.push_back(own);
  }
  return groups;
}

}  // namespace brigade
