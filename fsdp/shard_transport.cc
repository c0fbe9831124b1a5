#include "brigade/fsdp/shard_transport.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm/subgroup.h"

namespace brigade {

NeighbourGroups::NeighbourGroups(const Group& group,
                                 const std::vector<int>& numbers,
                                 c10::Device device) {
  for (const int number : numbers) {
    made_.try_emplace(number, group, number, device);
  }
}

NeighbourGroups::Made::Made(const Group& group, int number, c10::Device device)
    : scope(make_subgroup(group, row_of(group->getRank(), number), device)) {}

std::vector<NeighbourGroups::Group> NeighbourGroups::all() const {
  std::vector<Group> all;
  for (const auto& [number, made] : made_) all.push_back(made.scope.group());
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> NeighbourGroups::all_gather(
    const at::Tensor& whole, int number) const {
  const Group& group = of(number);
  const int64_t numel = whole.numel() / number;
  return gather_into(*group, whole,
                     whole.narrow(0, group->getRank() * numel, numel))
      ->getFuture();
}

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

class OrderedNeighbours {
 public:
  OrderedNeighbours(const Group& group, const std::vector<int>& numbers)
      : groups_(group, numbers) {
    for (const int number : numbers) {
      gathers_.try_emplace(number, groups_.of(number));
    }
  }
  OrderedCollectives& of(int number) { return gathers_.at(number); }

 private:
  const NeighbourGroups groups_;
  std::map<int, OrderedCollectives> gathers_;
};

// One row: gathers and sums need no groups but the given one.
class OrderedRow final : public ShardTransport {
 public:
  OrderedRow(const Group& group, const std::vector<int>& neighbours)
      : ShardTransport(group->getSize(), 1, group->getRank()),
        gathers_(group),
        sums_(group),
        neighbours_(group, neighbours) {}

  FuturePtr all_gather(const at::Tensor& whole) override {
    sent_.by_gathers += bytes_by_ring(whole, num_shards());
    return gathers_.all_gather(whole);
  }
  FuturePtr all_gather_near(const at::Tensor& whole, int num_ranks) override {
    sent_.by_gathers += bytes_by_ring(whole, num_ranks);
    return neighbours_.of(num_ranks).all_gather(whole);
  }
  FuturePtr reduce_scatter(const at::Tensor& whole, const at::Tensor& shard,
                           Sum sum) override {
    sent_.by_sums += bytes_by_ring(whole, num_shards());
    return sums_.reduce_scatter(whole, shard, sum.scale);
  }
  FuturePtr all_reduce(const at::Tensor& tensor) override {
    return gathers_.all_reduce(tensor);
  }
  Sent sent() const override { return sent_; }
  bool scales() const override { return true; }

 private:
  OrderedCollectives gathers_;
  OrderedCollectives sums_;
  OrderedNeighbours neighbours_;
  Sent sent_;
};

// Reduce-scatters over this rank's row, whose results are summed over its
// column: the bits of OrderedCollectives over all ranks with the row's length
// as group size.
class SumsOfRows {
 public:
  using FuturePtr = ShardTransport::FuturePtr;

  SumsOfRows(const Group& row, const Group& column)
      : has_one_row_(column->getSize() == 1),
        column_(column),
        row_(std::make_shared<OrderedCollectives>(row)) {}

  FuturePtr reduce_scatter(const at::Tensor& whole, const at::Tensor& shard,
                           const ShardTransport::Sum& sum) {
    // The row's sum is rounded and scaled at once where it is all.
    if (!sum.over_replicas || has_one_row_) {
      return row_->reduce_scatter(whole, shard, sum.scale);
    }
    FuturePtr in_row = row_->reduce_scatter(whole, shard);
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
    const FuturePtr total = column_.all_reduce(shard, sum.scale, in_row);
    // Ends the row's sums too, so that no peer of the row waits for this rank.
    total->addCallback([row = std::weak_ptr(row_)](c10::ivalue::Future& done) {
      if (!done.hasError()) return;
      if (const auto alive = row.lock()) alive->abort(done.exception_ptr());
    });
    return total;
  }

 private:
  const bool has_one_row_;
  OrderedCollectives column_;  // waits for the row's futures: ends after it
  std::shared_ptr<OrderedCollectives> row_;
};

class OrderedRows final : public ShardTransport {
 public:
  OrderedRows(const Group& group, int num_shards,
              const std::vector<int>& neighbours)
      : ShardTransport(num_shards, group->getSize() / num_shards,
                       group->getRank() % num_shards),
        row_(make_subgroup(group, row_of(group->getRank(), num_shards))),
        column_(make_subgroup(
            group, column_of(group->getRank(), num_shards, group->getSize()))),
        gathers_(row_.group()),
        sums_(row_.group(), column_.group()),
        all_(group),
        neighbours_(group, neighbours) {}

  FuturePtr all_gather(const at::Tensor& whole) override {
    sent_.by_gathers += bytes_by_ring(whole, num_shards());
    return gathers_.all_gather(whole);
  }
  FuturePtr all_gather_near(const at::Tensor& whole, int num_ranks) override {
    sent_.by_gathers += bytes_by_ring(whole, num_ranks);
    return neighbours_.of(num_ranks).all_gather(whole);
  }
  FuturePtr reduce_scatter(const at::Tensor& whole, const at::Tensor& shard,
                           Sum sum) override {
    sent_.by_sums += bytes_by_ring(whole, num_shards());
    if (sum.over_replicas) {
      sent_.by_sums += 2 * bytes_by_ring(shard, num_replicas());
    }
    return sums_.reduce_scatter(whole, shard, sum);
  }
  FuturePtr all_reduce(const at::Tensor& tensor) override {
    return all_.all_reduce(tensor);
  }
  Sent sent() const override { return sent_; }
  bool scales() const override { return true; }

 private:
  const GroupScope row_;
  const GroupScope column_;
  OrderedCollectives gathers_;
  SumsOfRows sums_;
  OrderedCollectives all_;
  OrderedNeighbours neighbours_;
  Sent sent_;
};

class GroupTransport final : public ShardTransport {
 public:
  GroupTransport(Group group, const std::vector<int>& neighbours)
      : ShardTransport(group->getSize(), 1, group->getRank()),
        group_(std::move(group)),
        neighbours_(group_, neighbours) {}

  FuturePtr all_gather(const at::Tensor& whole) override {
    const int64_t shard_numel = whole.numel() / num_shards();
    sent_.by_gathers += bytes_by_ring(whole, num_shards());
    return gather_into(*group_, whole,
                       whole.narrow(0, shard_rank() * shard_numel, shard_numel))
        ->getFuture();
  }
  FuturePtr all_gather_near(const at::Tensor& whole, int num_ranks) override {
    sent_.by_gathers += bytes_by_ring(whole, num_ranks);
    return neighbours_.all_gather(whole, num_ranks);
  }
  FuturePtr reduce_scatter(const at::Tensor& whole, const at::Tensor& shard,
                           Sum /*sum*/) override {
    sent_.by_sums += bytes_by_ring(whole, num_shards());
    return reduce_into(*group_, shard, whole)->getFuture();
  }
  FuturePtr all_reduce(const at::Tensor& tensor) override {
    std::vector<at::Tensor> tensors = {tensor};
    return group_->allreduce(tensors)->getFuture();
  }
  Sent sent() const override { return sent_; }
  bool scales() const override { return false; }

 private:
  const Group group_;
  const NeighbourGroups neighbours_;
  Sent sent_;
};

}  // namespace

std::unique_ptr<ShardTransport> make_ordered_transport(
    const Group& group, int num_shards, const std::vector<int>& neighbours) {
  TORCH_CHECK_VALUE(num_shards > 0 && group->getSize() % num_shards == 0,
                    "expected a number of shards that divides the number of "
                    "ranks, ",
                    group->getSize(), ", found ", num_shards,
                    ".\nGive the ranks of a host, or all.");
  if (num_shards == group->getSize()) {
    return std::make_unique<OrderedRow>(group, neighbours);
  }
  return std::make_unique<OrderedRows>(group, num_shards, neighbours);
}

std::unique_ptr<ShardTransport> make_group_transport(
    Group group, const std::vector<int>& neighbours) {
  return std::make_unique<GroupTransport>(std::move(group), neighbours);
}

}  // namespace brigade
