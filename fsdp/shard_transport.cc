#include "brigade/fsdp/shard_transport.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <utility>

#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm/subgroup.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Of a reduce-scatter or all-gather of these elements over `num_ranks`.
int64_t bytes_by_ring(const at::Tensor& whole, int num_ranks) {
  return static_cast<int64_t>(whole.nbytes()) / num_ranks * (num_ranks - 1);
}

}  // namespace

std::vector<int> row_of(int rank, int num_shards) {
  std::vector<int> ranks(num_shards);
  std::iota(ranks.begin(), ranks.end(), rank / num_shards * num_shards);
  return ranks;
}

std::vector<int> column_of(int rank, int num_shards, int num_ranks) {
  std::vector<int> ranks;
  for (int r = rank % num_shards; r < num_ranks; r += num_shards) {
    ranks.push_back(r);
  }
  return ranks;
}

ShardTransport::ShardTransport(const Group& group, int num_shards,
                               const ShardingStreams& streams,
                               const std::vector<int>& neighbours)
    : num_shards_(num_shards),
      num_replicas_(group->getSize() / num_shards),
      shard_rank_(group->getRank() % num_shards),
      streams_(streams) {
  for (const int number : neighbours) {
    neighbours_[number].reset(new GroupScope(make_subgroup(
        group, row_of(group->getRank(), number), streams.device())));
  }
}

ShardTransport::FuturePtr ShardTransport::all_gather(const at::Tensor& whole) {
  sent_.by_gathers += bytes_by_ring(whole, num_shards_);
  return gather_row(whole);
}

ShardTransport::FuturePtr ShardTransport::all_gather_near(
    const at::Tensor& whole, int num_ranks) {
  sent_.by_gathers += bytes_by_ring(whole, num_ranks);
  return gather_near(whole, num_ranks);
}

ShardTransport::FuturePtr ShardTransport::gather_near(const at::Tensor& whole,
                                                      int num_ranks) {
  const Group& group = neighbours_.at(num_ranks)->group();
  const int64_t numel = whole.numel() / num_ranks;
  return gather_into(*group, whole,
                     whole.narrow(0, group->getRank() * numel, numel))
      ->getFuture();
}

ShardTransport::FuturePtr ShardTransport::reduce_scatter(
    const at::Tensor& whole, const at::Tensor& shard, const Sum& of) {
  sent_.by_sums += bytes_by_ring(whole, num_shards_);
  if (of.over_replicas) {
    sent_.by_sums += 2 * bytes_by_ring(shard, num_replicas_);
  }
  return sum(whole, shard, of);
}

namespace {

class CpuTransport final : public ShardTransport {
 public:
  CpuTransport(const Group& group, int num_shards, const std::vector<int>& near)
      : ShardTransport(group, num_shards, ShardingStreams(at::kCPU), near) {
    Group row = group;
    if (num_replicas() > 1) {
      const int rank = group->getRank();
      row_.reset(
          new GroupScope(make_subgroup(group, row_of(rank, num_shards))));
      column_.reset(new GroupScope(
          make_subgroup(group, column_of(rank, num_shards, group->getSize()))));
      row = row_->group();
      column_sums_.emplace(column_->group());
      all_.emplace(group);
    }
    gathers_.emplace(row);
    row_sums_ = std::make_shared<OrderedCollectives>(row);
    for (const auto& [number, scope] : neighbours()) {
      near_.try_emplace(number, scope->group());
    }
  }

  FuturePtr all_reduce(const at::Tensor& tensor) override {
    return (all_ ? all_ : gathers_)->all_reduce(tensor);
  }
  bool scales() const override { return true; }

 private:
  FuturePtr gather_row(const at::Tensor& whole) override {
    return gathers_->all_gather(whole);
  }
  FuturePtr gather_near(const at::Tensor& whole, int num_ranks) override {
    return near_.at(num_ranks).all_gather(whole);
  }

  // The bits of OrderedCollectives over all ranks with the row's length as
  // group size.
  FuturePtr sum(const at::Tensor& whole, const at::Tensor& shard,
                const Sum& sum) override {
    // The row's sum is rounded and scaled at once where it is all.
    if (!sum.over_replicas || !column_sums_) {
      return row_sums_->reduce_scatter(whole, shard, sum.scale);
    }
    FuturePtr in_row = row_sums_->reduce_scatter(whole, shard);
    if (sum.of_row.defined()) {
      in_row = in_row->then(
          [shard, of_row = sum.of_row](c10::ivalue::Future& done) {
            const at::NoGradGuard no_grad;
            c10::IValue value = done.value();  // throws the row's error
            shard.add_(of_row);
            return value;
          },
          in_row->elementType());
    }
    const FuturePtr total = column_sums_->all_reduce(shard, sum.scale, in_row);
    // Ends the row's sums too, so that no peer of the row waits for this rank.
    total->addCallback(
        [row = std::weak_ptr(row_sums_)](c10::ivalue::Future& done) {
          if (!done.hasError()) return;
          if (const auto alive = row.lock()) alive->abort(done.exception_ptr());
        });
    return total;
  }

  std::unique_ptr<GroupScope> row_;  // null: the group is one row
  std::unique_ptr<GroupScope> column_;
  std::optional<OrderedCollectives> gathers_;
  // Waits for the row's futures: ends after it.
  std::optional<OrderedCollectives> column_sums_;
  std::shared_ptr<OrderedCollectives> row_sums_;
  std::optional<OrderedCollectives> all_;
  std::map<int, OrderedCollectives> near_;
};

}  // namespace

std::unique_ptr<ShardTransport> make_ordered_transport(
    const Group& group, int num_shards, const std::vector<int>& neighbours) {
  return std::make_unique<CpuTransport>(group, num_shards, neighbours);
}

}  // namespace brigade
