// What can't be sharded on one rank is the same error on all, and changes
// nothing.

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/message_of_call.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sharding_check_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

struct BadParameter {
  std::string words;
  std::function<at::Tensor()> make;
};

const std::vector<BadParameter>& bad_parameters() {
  static const auto& all = *new std::vector<BadParameter>{
      {"undefined", [] { return at::Tensor(); }},
      {"on meta", [] { return torch::empty({3}, at::kMeta); }},
      {"not dense", [] { return torch::eye(3).to_sparse(); }},
      {"computed from others",
       [] { return torch::ones({3}).requires_grad_() * 2; }},
  };
  return all;
}

TEST(ShardingCheckTest, ParametersMayLieSideBySideInOneStorage) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor all = torch::arange(15, torch::kFloat);
    const auto make = [&](int64_t begin, int64_t numel) {
      return all.narrow(0, begin, numel).detach().requires_grad_();
    };
    const at::Tensor first = make(0, 5);
    const at::Tensor second = make(5, 7);
    const at::Tensor third = make(12, 3);
    // Not in the order of their memory.
    const std::vector<UnitSpec> units = {
        {.name = "a", .parameters = {{"third", third}, {"first", first}}},
        {.name = "b", .parameters = {{"second", second}}}};
    ShardedRoot root(units, group, {});
    root.forward([&] {
          const at::Tensor h =
              root.call(0, torch::ones({1}), [&](const at::Tensor& x) {
                return x * (first.sum() + 2 * third.sum());
              });
          return root.call(
              1, h, [&](const at::Tensor& x) { return x + 3 * second.sum(); });
        })
        .backward();
    root.unshard();
    EXPECT_TRUE(at::equal(first, torch::arange(5, torch::kFloat)));
    EXPECT_TRUE(at::equal(second, torch::arange(5, 12, torch::kFloat)));
    EXPECT_TRUE(at::equal(third, torch::arange(12, 15, torch::kFloat)));
    root.reshard(/*writes=*/false);
    const at::Tensor in_two = make(11, 2);
    const std::vector<UnitSpec> overlapping = {
        {.name = "a", .parameters = {{"second", make(5, 7)}}},
        {.name = "b", .parameters = {{"in two", in_two}}}};
    EXPECT_THAT(message_of([&] { ShardedRoot(overlapping, group, {}); }),
                HasSubstr("'in two' of unit 'b' shares its memory with "
                          "'second' of unit 'a'"));
  });
}

TEST(ShardingCheckTest, ABadParameterOnOneRankIsAnErrorOnAll) {
  run_ranks(2, [](const Group& group) {
    for (const BadParameter& bad : bad_parameters()) {
      SCOPED_TRACE(bad.words);
      const at::Tensor good = torch::ones({4}).requires_grad_();
      const at::Tensor second = group->getRank() == 1
                                    ? bad.make()
                                    : torch::ones({3}).requires_grad_();
      const std::vector<UnitSpec> units = {
          {.name = "block",
           .parameters = {{.name = "good", .tensor = good},
                          {.name = "second", .tensor = second}}}};
      EXPECT_THAT(
          message_of([&] { ShardedRoot(units, group, {}); }),
          AllOf(HasSubstr("'second' of unit 'block'"), HasSubstr(bad.words)));
      EXPECT_TRUE(at::equal(good, torch::ones({4})));
    }
  });
}

// Ranks look at the first one before they tell each other anything.
TEST(ShardingCheckTest, ABadFirstParameterOnOneRankIsAnErrorOnAll) {
  run_ranks(2, [](const Group& group) {
    for (const BadParameter& bad : bad_parameters()) {
      SCOPED_TRACE(bad.words);
      const at::Tensor first = group->getRank() == 1
                                   ? bad.make()
                                   : torch::ones({3}).requires_grad_();
      const std::vector<UnitSpec> units = {
          {.name = "block",
           .parameters = {{.name = "first", .tensor = first}}}};
      EXPECT_THAT(
          message_of([&] { ShardedRoot(units, group, {}); }),
          AllOf(HasSubstr("'first' of unit 'block'"), HasSubstr(bad.words)));
    }
  });
}

TEST(ShardingCheckTest, UnitsOnMetaAreMadeAnewBeforeThereIsARoot) {
  run_ranks(2, [](const Group& group) {
    const int rank = group->getRank();
    const auto spec_of = [](const at::Tensor& tensor) {
      return std::vector<UnitSpec>{
          {.name = "block", .parameters = {{.name = "w", .tensor = tensor}}}};
    };
    const at::Tensor on_meta = torch::empty({3, 3}, at::kMeta).requires_grad_();
    const auto made =
        make_units(spec_of(on_meta), group, {.allows_meta = true});
    EXPECT_EQ(made[0].shards[0].numel(), rank == 0 ? 5 : 4);
    EXPECT_TRUE(made[0].shards[0].is_meta());
    EXPECT_THAT(message_of([&] {
                  ShardedRoot(make_units(spec_of(torch::empty({3}, at::kMeta)),
                                         group, {.allows_meta = true}),
                              group, {});
                }),
                HasSubstr("unit 'block' is on meta"));
  });
}

// As a cast does: an optimizer has them.
TEST(ShardingCheckTest, ShardsThatAreGivenAreThoseOfTheUnitsMadeAnew) {
  run_ranks(2, [](const Group& group) {
    const auto spec_of = [](at::ScalarType dtype) {
      return UnitSpec{
          .name = "block",
          .parameters = {{.name = "w",
                          .tensor = torch::ones({5}, dtype).requires_grad_()}}};
    };
    const at::Tensor shard =
        make_units({spec_of(at::kFloat)}, group, {})[0].shards[0];
    UnitSpec anew = spec_of(at::kDouble);
    anew.shards = {shard};
    const at::Tensor whole = anew.parameters[0].tensor;
    ShardedRoot root(std::vector<UnitSpec>{anew}, group, {});
    EXPECT_TRUE(root.shards()[0].is_same(shard));
    EXPECT_EQ(shard.scalar_type(), at::kDouble);
    for (int step = 1; step < 4; ++step) {
      root.settings(0).reshards_after_backward = false;
      root.forward([&] {
            return root.call(0, torch::ones({1}), [&](const at::Tensor& in) {
              EXPECT_TRUE((whole == step).all().item<bool>());  // not the last
              return (whole * in).sum();
            });
          })
          .backward();
      const torch::NoGradGuard no_grad;
      at::Tensor(shard).add_(shard.grad());
      at::Tensor(shard).mutable_grad() = at::Tensor();
    }
  });
}

}  // namespace sharding_check_test
}  // namespace brigade
