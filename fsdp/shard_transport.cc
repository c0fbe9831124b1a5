#include "brigade/fsdp/shard_transport.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm/ordered/ordered_sum.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Bytes that one rank sends in a ring reduce-scatter or all-gather of `whole`.
int64_t bytes_by_ring(const at::Tensor& whole, int num_ranks) {
  return static_cast<int64_t>(whole.nbytes()) / num_ranks * (num_ranks - 1);
}

}  // namespace

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
               const std::vector<int>& gather_sizes)
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
                  const ShardingStreams& streams, std::vector<int> gather_sizes,
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
    gather_sizes.push_back(num_shards);
    for (const int size : gather_sizes) {
      gathers_[size].reset(new GroupScope(make_subgroup(
          group, shard_group_ranks(group->getRank(), size), streams.device())));
    }
  }

  bool scales() const override { return in_order_; }

  std::vector<Group> own_groups() const override {
    std::vector<Group> groups = {shard_group_.group(), replica_group_.group()};
    for (const auto& [size, scope] : gathers_) {
      groups.push_back(scope->group());
    }
    std::erase_if(groups, [](const Group& g) { return g->getSize() == 1; });
    return groups;
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
    if (!options.over_replicas) return partial;
    return reduce_over_replicas(partial, shard, options.partial_sum);
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

  // `partial`: completes when `shard` has the shard group's reduction.
  FuturePtr reduce_over_replicas(const FuturePtr& partial,
                                 const at::Tensor& shard,
                                 const at::Tensor& partial_sum) {
    if (num_replicas() == 1) return partial;
    partial->waitAndThrow();  // only the stream waits
    if (partial_sum.defined()) {
      const at::NoGradGuard no_grad;
      shard.add_(partial_sum);
    }
    std::vector<at::Tensor> tensors = {shard};
    return replica_group_.group()->allreduce(tensors)->getFuture();
  }

  std::map<int, std::unique_ptr<GroupScope>> gathers_;  // by number of ranks
  const GroupScope shard_group_;
  const GroupScope replica_group_;
  const bool in_order_;
  const bool is_over_gloo_;
};

}  // namespace

std::unique_ptr<ShardTransport> make_ordered_transport(
    const Group& group, int num_shards, const std::vector<int>& gather_sizes) {
  return std::make_unique<CpuTransport>(group, num_shards, gather_sizes);
}

std::unique_ptr<ShardTransport> make_device_transport(
    const Group& group, int num_shards, const ShardingStreams& streams,
    const std::vector<int>& gather_sizes, bool in_order) {
  return std::make_unique<DeviceTransport>(group, num_shards, streams,
                                           gather_sizes, in_order);
}

}  // namespace brigade
