#include "brigade/fsdp/shard_transport.h"

#include <ATen/core/grad_mode.h>

#include <map>
#include <numeric>
#include <optional>

#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm/process_group.h"

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
                               const ShardingStreams& streams)
    : num_shards_(num_shards),
      num_replicas_(group->getSize() / num_shards),
      shard_rank_(group->getRank() % num_shards),
      streams_(streams) {}

ShardTransport::FuturePtr ShardTransport::all_gather(const at::Tensor& whole,
                                                     int num_ranks) {
  sent_.by_gathers += bytes_by_ring(whole, num_ranks);
  return gather(whole, num_ranks);
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
  CpuTransport(const Group& group, int num_shards,
               const std::vector<int>& neighbours)
      : ShardTransport(group, num_shards, ShardingStreams(at::kCPU)) {
    const int rank = group->getRank();
    const auto subgroup = [&](const std::vector<int>& ranks) -> const Group& {
      scopes_.emplace_back(new GroupScope(make_subgroup(group, ranks)));
      return scopes_.back()->group();
    };
    Group row = group;
    if (num_replicas() > 1) {
      row = subgroup(row_of(rank, num_shards));
      column_sums_.emplace(
          subgroup(column_of(rank, num_shards, group->getSize())));
    }
    row_sums_ = std::make_shared<OrderedCollectives>(row);
    gathers_.try_emplace(num_shards, row);
    for (const int number : neighbours) {
      gathers_.try_emplace(number, subgroup(row_of(rank, number)));
    }
  }

  bool scales() const override { return true; }

 private:
  FuturePtr gather(const at::Tensor& whole, int num_ranks) override {
    return gathers_.at(num_ranks).all_gather(whole);
  }

  // Rows first, each in rank order and rounded; then their sums.
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

  std::vector<std::unique_ptr<GroupScope>> scopes_;
  std::map<int, OrderedCollectives> gathers_;  // by number of ranks
  // Waits for the row's futures: ends after it. None: the group is one row.
  std::optional<OrderedCollectives> column_sums_;
  std::shared_ptr<OrderedCollectives> row_sums_;
};

}  // namespace

std::unique_ptr<ShardTransport> make_ordered_transport(
    const Group& group, int num_shards, const std::vector<int>& neighbours) {
  return std::make_unique<CpuTransport>(group, num_shards, neighbours);
}

}  // namespace brigade
