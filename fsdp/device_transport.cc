#include "brigade/fsdp/device_transport.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/ordered/ordered_sum.h"
#include "brigade/comm/streams/futures.h"
#include "brigade/comm/subgroup.h"
#include "brigade/fsdp/shard_transport.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

class DeviceTransport final : public ShardTransport {
 public:
  DeviceTransport(const Group& group, int num_shards,
                  const ShardingStreams& streams,
                  const std::vector<int>& neighbours, bool in_order)
      : ShardTransport(num_shards, group->getSize() / num_shards,
                       group->getRank() % num_shards, streams),
        gathers_(make_subgroup(group, row_of(group->getRank(), num_shards),
                               streams.device())),
        sums_(make_subgroup(group, row_of(group->getRank(), num_shards),
                            streams.device())),
        column_(make_subgroup(
            group, column_of(group->getRank(), num_shards, group->getSize()),
            streams.device())),
        neighbours_(group, neighbours, streams.device()),
        in_order_(in_order),
        is_over_gloo_(is_over_gloo(*sums_.group(), streams.device().type())) {}

  FuturePtr all_gather(const at::Tensor& whole) override {
    const int64_t shard_numel = whole.numel() / num_shards();
    sent_.by_gathers += bytes_by_ring(whole, num_shards());
    return gather_into(*gathers_.group(), whole,
                       whole.narrow(0, shard_rank() * shard_numel, shard_numel))
        ->getFuture();
  }

  FuturePtr all_gather_near(const at::Tensor& whole, int num_ranks) override {
    sent_.by_gathers += bytes_by_ring(whole, num_ranks);
    return neighbours_.all_gather(whole, num_ranks);
  }

  FuturePtr reduce_scatter(const at::Tensor& whole, const at::Tensor& shard,
                           Sum sum) override {
    sent_.by_sums += bytes_by_ring(whole, num_shards());
    if (in_order_) return reduce_in_order(whole, shard, sum);
    if (sum.over_replicas) {
      sent_.by_sums += 2 * bytes_by_ring(shard, num_replicas());
    }
    if (is_over_gloo_) {
      sent_.by_sums += bytes_by_ring(whole, num_shards());  // of an all-reduce
      return reduce_over_gloo(whole, shard, sum);
    }
    const auto in_row = reduce_into(*sums_.group(), shard, whole);
    return sum.over_replicas ? over_column(in_row, shard, sum.of_row)
                             : in_row->getFuture();
  }

  FuturePtr all_reduce(const at::Tensor& tensor) override {
    if (tensor.device() != streams().device()) return all_reduce_there(tensor);
    std::vector<at::Tensor> tensors = {tensor};
    return over_column(sums_.group()->allreduce(tensors), tensor);
  }

  Sent sent() const override { return sent_; }
  bool scales() const override { return in_order_; }

  std::vector<Group> own_groups() const override {
    std::vector<Group> groups;
    for (const GroupScope* scope : {&gathers_, &sums_, &column_}) {
      if (scope->group()->getSize() > 1) groups.push_back(scope->group());
    }
    for (Group& group : neighbours_.all()) groups.push_back(std::move(group));
    return groups;
  }

 private:
  // On the current stream, behind the collectives. As OrderedCollectives have
  // it: a level is rounded where its sum travels on, the last one's behind the
  // scale.
  FuturePtr reduce_in_order(const at::Tensor& whole, const at::Tensor& shard,
                            const Sum& sum) {
    const at::NoGradGuard no_grad;
    // Before anything is launched: a lack of memory is this rank's alone then.
    const bool in_column = sum.over_replicas && num_replicas() > 1;
    const at::Tensor parts = num_shards() > 1 ? at::empty_like(whole) : whole;
    const at::Tensor total = empty_sum(shard.numel(), shard);
    const at::Tensor of_rows =
        in_column ? at::empty({num_replicas() * shard.numel()}, shard.options())
                  : at::Tensor();
    if (num_shards() > 1) {
      join_current_stream(exchange_parts(*sums_.group(), parts, whole));
    }
    sum_in_order(parts, num_shards(), total);
    if (in_column) {
      sent_.by_sums +=
          static_cast<int64_t>(shard.nbytes()) * (num_replicas() - 1);
      shard.copy_(total);
      if (sum.of_row.defined()) shard.add_(sum.of_row);
      join_current_stream(gather_into(*column_.group(), of_rows, shard));
      sum_in_order(of_rows, num_replicas(), total);
    }
    if (sum.scale != 1) total.mul_(sum.scale);
    shard.copy_(total);
    return completed_future({shard});
  }

  // Whose sums of slices have no future. The host waits. Overwrites `whole`.
  FuturePtr reduce_over_gloo(const at::Tensor& whole, const at::Tensor& shard,
                             const Sum& sum) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> tensors = {whole};
    join_current_stream(sums_.group()->allreduce(tensors));
    shard.copy_(whole.narrow(0, shard_rank() * shard.numel(), shard.numel()));
    if (!sum.over_replicas || num_replicas() == 1) {
      return completed_future({shard});
    }
    if (sum.of_row.defined()) shard.add_(sum.of_row);
    tensors = {shard};
    return column_.group()->allreduce(tensors)->getFuture();
  }

  // The sum of a row is in `tensor` when `row` is done. `of_row`: Sum's.
  FuturePtr over_column(const c10::intrusive_ptr<c10d::Work>& row,
                        const at::Tensor& tensor,
                        const at::Tensor& of_row = {}) {
    if (num_replicas() == 1) return row->getFuture();
    join_current_stream(row);  // pairs with the column's launch
    if (of_row.defined()) {
      const at::NoGradGuard no_grad;
      tensor.add_(of_row);
    }
    std::vector<at::Tensor> tensors = {tensor};
    return column_.group()->allreduce(tensors)->getFuture();
  }

  // A tensor of the host, which waits.
  FuturePtr all_reduce_there(const at::Tensor& tensor) {
    const at::Tensor there = tensor.to(streams().device());
    FuturePtr sum = all_reduce(there);
    sum->waitAndThrow();
    tensor.copy_(there);
    return sum;
  }

  const GroupScope gathers_;
  const GroupScope sums_;
  const GroupScope column_;
  const NeighbourGroups neighbours_;
  const bool in_order_;
  const bool is_over_gloo_;
  Sent sent_;
};

}  // namespace

std::unique_ptr<ShardTransport> make_device_transport(
    const Group& group, int num_shards, const ShardingStreams& streams,
    const std::vector<int>& neighbours, bool in_order) {
  return std::make_unique<DeviceTransport>(group, num_shards, streams,
                                           neighbours, in_order);
}

}  // namespace brigade
