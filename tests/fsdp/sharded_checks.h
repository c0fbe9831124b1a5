// A step of a sharded net, and what shards must be afterwards.

#ifndef BRIGADE_TESTS_FSDP_SHARDED_CHECKS_H_
#define BRIGADE_TESTS_FSDP_SHARDED_CHECKS_H_

#include <cstddef>
#include <vector>

#include "brigade/tests/fsdp/sharded_net.h"
#include "gtest/gtest.h"

namespace brigade::testing {

// Each term is added to the sum at its place; the first ones become the sums.
inline void add(std::vector<at::Tensor>& sums,
                const std::vector<at::Tensor>& terms) {
  for (size_t i = 0; i < terms.size(); ++i) {
    if (sums.size() == i) {
      sums.push_back(terms[i].clone());
    } else {
      sums[i].add_(terms[i]);
    }
  }
}

inline void train_step(ShardedRoot& root, const Net& net, int rank, int step) {
  loss_of(root.forward([&] {
    return net.run(root, net.input(rank, step));
  })).backward();
}

// Shards, or their gradients, are this rank's parts of `whole`.
inline void expect_shards(const ShardedRoot& root,
                          const std::vector<at::Tensor>& whole, int shard_rank,
                          bool of_gradients) {
  size_t index = 0;
  for (size_t unit = 0; unit < root.num_units(); ++unit) {
    for (size_t i = 0; i < root.shards_of(unit).size(); ++i, ++index) {
      const at::Tensor& shard = root.shards_of(unit)[i];
      const at::Tensor expected =
          part_of(whole[index], root, unit, i, shard_rank);
      const at::Tensor found = of_gradients ? shard.grad() : shard.detach();
      ASSERT_TRUE(found.defined()) << "unit " << unit << " parameter " << i;
      ASSERT_TRUE(at::equal(found.flatten(), expected))
          << "unit " << unit << " parameter " << i << ": " << found
          << ", expected " << expected;
    }
  }
}

inline void expect_gradients(const ShardedRoot& root,
                             const std::vector<at::Tensor>& whole,
                             int shard_rank) {
  expect_shards(root, whole, shard_rank, /*of_gradients=*/true);
}

// A reference has zeros there.
inline void zero_what_no_rank_used(const ShardedRoot& root) {
  for (const at::Tensor& shard : root.shards()) {
    if (!shard.grad().defined()) {
      shard.mutable_grad() = at::zeros_like(shard);
    }
  }
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_SHARDED_CHECKS_H_
