#include "brigade/fsdp/units/shard_gradient.h"

#include <torch/torch.h>

#include <vector>

#include "gtest/gtest.h"

namespace brigade {
namespace shard_gradient_test {

constexpr int64_t kNumel = 3;  // of each of two parameters

// A shard of two parameters, one behind the other.
struct Shard {
  explicit Shard(at::ScalarType sum_dtype = at::kFloat)
      : flat(torch::zeros({2 * kNumel})), gradient(flat, sum_dtype, view_of) {
    for (size_t i = 0; i < 2; ++i) {
      parts.push_back(view_of(flat, i).detach().requires_grad_());
    }
  }

  static at::Tensor view_of(const at::Tensor& of, size_t parameter) {
    return of.narrow(0, static_cast<int64_t>(parameter) * kNumel, kNumel);
  }

  // What peers and this rank have summed.
  const void* sum(double value) {
    gradient.prepare();
    at::Tensor pending = gradient.pending();
    pending.fill_(value);
    return pending.const_data_ptr();
  }

  void expect(size_t parameter, double value) const {
    const at::Tensor& found = parts[parameter].grad();
    ASSERT_TRUE(found.defined());
    EXPECT_TRUE(at::equal(found, at::full_like(found, value))) << found;
  }

  void set_to_none() {
    for (at::Tensor& part : parts) part.mutable_grad().reset();
  }

  at::Tensor flat;
  std::vector<at::Tensor> parts;
  ShardGradient gradient;
};

TEST(ShardGradientTest, ASumBecomesTheGradientAsItIs) {
  Shard shard;
  const void* const sum = shard.sum(6);
  shard.gradient.commit(shard.parts, {1, 1}, 0.5);
  shard.expect(0, 3);
  shard.expect(1, 3);
  EXPECT_EQ(shard.parts[0].grad().const_data_ptr(), sum);
}

TEST(ShardGradientTest, MemoryThatNobodyHoldsIsTheNextSums) {
  Shard shard;
  const void* const first = shard.sum(1);
  shard.gradient.commit(shard.parts, {1, 1}, 1);
  shard.set_to_none();
  EXPECT_EQ(shard.sum(2), first);
  shard.gradient.commit(shard.parts, {1, 1}, 1);
  const at::Tensor kept = shard.parts[1].grad();
  shard.set_to_none();
  EXPECT_NE(shard.sum(7), first);
  shard.gradient.commit(shard.parts, {1, 1}, 1);
  EXPECT_TRUE(at::equal(kept, at::full_like(kept, 2)));
  shard.expect(1, 7);
}

TEST(ShardGradientTest, SumsAreAddedToGradientsThatAreThere) {
  Shard shard;
  const void* const first = shard.sum(1);
  shard.gradient.commit(shard.parts, {1, 0}, 1);
  EXPECT_FALSE(shard.parts[1].grad().defined());
  const void* const second = shard.sum(4);
  EXPECT_NE(second, first);
  shard.gradient.commit(shard.parts, {1, 1}, 1);
  shard.expect(0, 5);
  shard.expect(1, 4);
  EXPECT_EQ(shard.parts[0].grad().const_data_ptr(), first);
  shard.sum(10);
  shard.gradient.commit(shard.parts, {0, 1}, 1);
  shard.expect(0, 5);
  shard.expect(1, 14);
}

TEST(ShardGradientTest, SumsOfAnotherDtypeAreCopied) {
  Shard shard(at::kBFloat16);
  const void* const sum = shard.sum(3);
  shard.gradient.commit(shard.parts, {1, 1}, 1);
  EXPECT_EQ(shard.parts[0].grad().scalar_type(), at::kFloat);
  shard.expect(0, 3);
  EXPECT_EQ(shard.sum(1), sum) << "it is for the next";
}

TEST(ShardGradientTest, WhatRowsHaveSummedIsKeptUntilItIsDropped) {
  Shard shard;
  EXPECT_FALSE(shard.gradient.partial().defined());
  shard.sum(1);
  shard.gradient.keep_partial();
  shard.sum(2);
  shard.gradient.keep_partial();
  shard.gradient.zero_partial(1);
  const at::Tensor partial = shard.gradient.partial();
  EXPECT_TRUE(at::equal(
      partial, torch::tensor({3., 3., 3., 0., 0., 0.}).to(at::kFloat)));
  shard.gradient.drop_partial();
  EXPECT_FALSE(shard.gradient.has_partial());
  EXPECT_FALSE(shard.parts[0].grad().defined());
}

TEST(ShardGradientTest, WhatIsAbandonedIsNotUsedAgain) {
  Shard shard;
  const void* const sum = shard.sum(1);
  const at::Tensor abandoned = shard.gradient.abandon_pending();
  EXPECT_EQ(abandoned.const_data_ptr(), sum);
  EXPECT_TRUE(shard.gradient.prepare()) << "new";
  EXPECT_NE(shard.sum(2), sum);
  shard.gradient.commit(shard.parts, {1, 1}, 1);
  shard.expect(0, 2);
  EXPECT_TRUE(at::equal(abandoned, at::full_like(abandoned, 1)));
}

}  // namespace shard_gradient_test
}  // namespace brigade
