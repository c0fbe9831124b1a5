#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/ordered/ordered_sum.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/streams/streams.h"
#include "brigade/fsdp/shard_transport.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

class DeviceTransport final : public ShardTransport {
 public:
  DeviceTransport(const Group& group, int num_shards,
                  const ShardingStreams& streams, std::vector<int> neighbours,
                  bool in_order)
      : ShardTransport(group, num_shards, streams),
        sums_(make_subgroup(group, row_of(group->getRank(), num_shards),
                            streams.device())),
        column_(make_subgroup(
            group, column_of(group->getRank(), num_shards, group->getSize()),
            streams.device())),
        in_order_(in_order),
        is_over_gloo_(is_over_gloo(*sums_.group(), streams.device().type())) {
    neighbours.push_back(num_shards);
    for (const int number : neighbours) {
      gathers_[number].reset(new GroupScope(make_subgroup(
          group, row_of(group->getRank(), number), streams.device())));
    }
  }

  bool scales() const override { return in_order_; }

  std::vector<Group> own_groups() const override {
    std::vector<Group> groups = {sums_.group(), column_.group()};
    for (const auto& [number, scope] : gathers_) {
      groups.push_back(scope->group());
    }
    std::erase_if(groups, [](const Group& g) { return g->getSize() == 1; });
    return groups;
  }

 private:
  FuturePtr gather(const at::Tensor& whole, int num_ranks) override {
    const Group& group = gathers_.at(num_ranks)->group();
    const int64_t numel = whole.numel() / num_ranks;
    return all_gather_into(*group, whole,
                           whole.narrow(0, group->getRank() * numel, numel))
        ->getFuture();
  }

  FuturePtr sum(const at::Tensor& whole, const at::Tensor& shard,
                const Sum& sum) override {
    if (in_order_) return sum_in_order_of_ranks(whole, shard, sum);
    FuturePtr in_row;
    if (is_over_gloo_) {  // whose sums of slices have no future: the host waits
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> tensors = {whole};
      wait_on_current_stream(sums_.group()->allreduce(tensors));
      shard.copy_(whole.narrow(0, shard_rank() * shard.numel(), shard.numel()));
      in_row = completed_future({shard});
    } else {
      in_row = reduce_scatter_into(*sums_.group(), shard, whole)->getFuture();
    }
    return sum.over_replicas ? over_column(in_row, shard, sum.of_row) : in_row;
  }

  // On the current stream, after the collectives. A row's sum is rounded where
  // it travels on, the last one after the scale.
  FuturePtr sum_in_order_of_ranks(const at::Tensor& whole,
                                  const at::Tensor& shard, const Sum& sum) {
    const at::NoGradGuard no_grad;
    // Before anything is launched: a lack of memory is this rank's alone then.
    const bool in_column = sum.over_replicas && num_replicas() > 1;
    const at::Tensor parts = num_shards() > 1 ? at::empty_like(whole) : whole;
    const at::Tensor total = empty_sum(shard.numel(), shard);
    const at::Tensor of_rows =
        in_column ? at::empty({num_replicas() * shard.numel()}, shard.options())
                  : at::Tensor();
    if (num_shards() > 1) {
      wait_on_current_stream(all_to_all_into(*sums_.group(), parts, whole));
    }
    sum_in_order(parts, num_shards(), total);
    if (in_column) {
      shard.copy_(total);
      if (sum.of_row.defined()) shard.add_(sum.of_row);
      wait_on_current_stream(all_gather_into(*column_.group(), of_rows, shard));
      sum_in_order(of_rows, num_replicas(), total);
    }
    if (sum.scale != 1) total.mul_(sum.scale);
    shard.copy_(total);
    return completed_future({shard});
  }

  // The sum of a row is in `tensor` when `in_row` is done. `of_row`: Sum's.
  FuturePtr over_column(const FuturePtr& in_row, const at::Tensor& tensor,
                        const at::Tensor& of_row) {
    if (num_replicas() == 1) return in_row;
    in_row->waitAndThrow();  // the stream does; pairs with the column's launch
    if (of_row.defined()) {
      const at::NoGradGuard no_grad;
      tensor.add_(of_row);
    }
    std::vector<at::Tensor> tensors = {tensor};
    return column_.group()->allreduce(tensors)->getFuture();
  }

  std::map<int, std::unique_ptr<GroupScope>> gathers_;  // by number of ranks
  const GroupScope sums_;
  const GroupScope column_;
  const bool in_order_;
  const bool is_over_gloo_;
};

}  // namespace

std::unique_ptr<ShardTransport> make_device_transport(
    const Group& group, int num_shards, const ShardingStreams& streams,
    const std::vector<int>& neighbours, bool in_order) {
  return std::make_unique<DeviceTransport>(group, num_shards, streams,
                                           neighbours, in_order);
}

}  // namespace brigade
