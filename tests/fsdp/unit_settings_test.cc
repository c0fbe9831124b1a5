// What a user sets of units between steps, and what ranks do beside backwards.

#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/sharded_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace unit_settings_test {

using testing::expect_gradients;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::Net;
using testing::part_of;
using testing::Reference;
using testing::run_ranks;
using testing::sgd;
using testing::train_step;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr double kRate = 0.1;

at::Tensor forward_loss(ShardedRoot& root, const Net& net, int rank, int step) {
  return loss_of(
      root.forward([&] { return net.run(root, net.input(rank, step)); }));
}

// Of small integers, whose sums have no order.
at::Tensor integer_loss(ShardedRoot& root, const at::Tensor& weight, int rank,
                        int batch) {
  return root.forward([&] {
    return root.call(0, torch::ones({1}), [&](const at::Tensor& in) {
      return (weight * in).sum() * (1 + rank + 10 * batch);
    });
  });
}

TEST(UnitSettingsTest, RowsAloneMayAddUpSeveralBackwards) {
  for (const int num_backwards : {1, 2, 4}) {
    run_ranks(4, [&](const Group& group) {
      const int rank = group->getRank();
      at::Tensor weight = torch::ones({7}).requires_grad_();
      ShardedRoot root(
          std::vector<UnitSpec>{{.name = "", .parameters = {{"w", weight}}}},
          group, {.num_shards = 2});
      const at::Tensor shard = root.shards()[0];
      for (int step = 0; step < 3; ++step) {
        double expected = 0;
        for (int batch = 0; batch < num_backwards; ++batch) {
          const bool is_last = batch + 1 == num_backwards;
          root.set_sums_over_replicas(is_last);
          integer_loss(root, weight, rank, batch).backward();
          for (int r = 0; r < 4; ++r) expected += 1 + r + 10 * batch;
          EXPECT_EQ(shard.grad().defined(), is_last);
        }
        EXPECT_TRUE((shard.grad() == expected / 4).all().item<bool>())
            << shard.grad() << ", expected " << expected / 4;
        shard.mutable_grad() = at::Tensor();
      }
    });
  }
}

TEST(UnitSettingsTest, ARowThatFailsDropsWhatRowsHaveAddedUp) {
  run_ranks(4, [&](const Group& group) {
    const int rank = group->getRank();
    at::Tensor weight = torch::ones({7}).requires_grad_();
    ShardedRoot root(
        std::vector<UnitSpec>{{.name = "", .parameters = {{"w", weight}}}},
        group, {.num_shards = 2});
    root.set_sums_over_replicas(false);
    integer_loss(root, weight, rank, 0).backward();
    root.set_sums_over_replicas(true);
    EXPECT_ANY_THROW(root.forward([&]() -> at::Tensor {
                           TORCH_CHECK(rank != 1, "rank 1 fails");
                           return root.call(0, torch::ones({1}),
                                            [&](const at::Tensor& in) {
                                              return (weight * in).sum();
                                            });
                         })
                         .backward());
    if (rank == 1) {  // its peers have met it where they began to reduce
      EXPECT_TRUE(root.can_continue());
    }
    integer_loss(root, weight, rank, 0).backward();
    EXPECT_TRUE((root.shards()[0].grad() == 2.5).all().item<bool>())
        << root.shards()[0].grad();
  });
}

TEST(UnitSettingsTest, SumsAreDividedByWhatIsSet) {
  for (const int num_shards : {1, 2}) {
    run_ranks(2, [&](const Group& group) {
      const int rank = group->getRank();
      Net plain;
      Net net;
      Reference reference(plain);
      ShardedRoot root(net.units(), group, {.num_shards = num_shards});
      for (size_t unit = 0; unit < root.num_units(); ++unit) {
        root.settings(unit).gradient_divisor = 1;
      }
      reference.accumulate(
          2, [&](int r) { return loss_of(plain.run(plain.input(r, 0))); });
      train_step(root, net, rank, 0);
      for (at::Tensor& gradient : reference.gradients) gradient.mul_(2);
      expect_gradients(root, reference.gradients, rank % num_shards);
    });
  }
}

TEST(UnitSettingsTest, RanksThatDivideDifferentlyRaiseTheSame) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net;
    ShardedRoot root(net.units(), group, {});
    if (rank == 1) root.settings(2).gradient_divisor = 3;
    try {
      train_step(root, net, rank, 0);
    } catch (const c10::Error& error) {
      texts[rank] = error.what_without_backtrace();
    }
    root.settings(2).gradient_divisor = 3;
    EXPECT_NO_THROW(train_step(root, net, rank, 1));
  });
  EXPECT_THAT(texts[0], Not(::testing::IsEmpty()));
  EXPECT_EQ(texts[0], texts[1]);
}

TEST(UnitSettingsTest, UnitsMayStayWholeBehindBackward) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net plain;
    Net net;
    ShardedRoot root(net.units(), group, {.trusts_versions = true});
    for (size_t unit = 0; unit < root.num_units(); ++unit) {
      root.settings(unit).reshards_after_backward = false;
      root.settings(unit).reshards_after_forward = false;
    }
    for (int step = 0; step < 2; ++step) {
      Reference reference(plain);
      reference.accumulate(
          2, [&](int r) { return loss_of(plain.run(plain.input(r, step))); });
      std::vector<at::Tensor> first = reference.gradients;
      reference.accumulate(2, [&](int r) {
        return loss_of(plain.run(plain.input(r, step + 10)));
      });
      train_step(root, net, rank, step);
      const int64_t ahead = root.statistics().ahead_gathers;
      // Whole still: the second batch gathers nothing.
      EXPECT_TRUE(at::equal(net.blocks[1].weight, plain.blocks[1].weight));
      train_step(root, net, rank, step + 10);
      EXPECT_EQ(root.statistics().ahead_gathers, ahead);
      for (size_t i = 0; i < first.size(); ++i)
        first[i] += reference.gradients[i];
      expect_gradients(root, first, rank);
      reference.gradients = first;
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
    EXPECT_EQ(root.statistics().late_gathers, 0);
  });
}

// A unit that is used on one rank only is whole on both.
TEST(UnitSettingsTest, UnitsOfDifferentBranchesMayStayWholeBehindBackward) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net plain({4, 4, 4});
    Net net({4, 4, 4});
    Reference reference(plain);
    ShardedRoot root(net.units(), group, {});
    for (size_t unit = 0; unit < root.num_units(); ++unit) {
      root.settings(unit).reshards_after_backward = false;
    }
    for (int step = 0; step < 4; ++step) {
      const auto order_of = [&](int r) {
        return (step + r) % 2 == 0 ? std::vector<size_t>{0}
                                   : std::vector<size_t>{1};
      };
      reference.accumulate(2, [&](int r) {
        at::Tensor h = plain.input(r, step);
        for (const size_t i : order_of(r)) h = plain.blocks[i].run(h);
        return loss_of(h * plain.head);
      });
      loss_of(root.forward([&] {
        return net.run(root, net.input(rank, step), order_of(rank));
      })).backward();
      expect_gradients(root, reference.gradients, rank);
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
  });
}

TEST(UnitSettingsTest, AUnitThatBackwardDoesNotReadIsNotGathered) {
  run_ranks(2, [&](const Group& group) {
    at::Tensor offset = torch::zeros({4}).requires_grad_();
    at::Tensor gain = torch::full({4}, 2.0).requires_grad_();
    ShardedRoot root(
        std::vector<UnitSpec>{
            {.name = "gain",
             .parameters = {{"gain", gain}},
             .reshards_after_forward = false},
            {.name = "offset", .parameters = {{"offset", offset}}}},
        group, {.prefetch_depth = 0});
    root.settings(1).gathers_in_backward = false;
    const at::Tensor y = root.forward([&] {
      return root.call(0, torch::ones({4}), [&](at::Tensor x) {
        x = root.call(1, x, [&](const at::Tensor& in) { return in + offset; });
        return x * gain;
      });
    });
    y.register_hook([&](const at::Tensor&) {
      EXPECT_ANY_THROW(offset.sum()) << "it is sharded in backward";
    });
    y.sum().backward();
    EXPECT_ANY_THROW(offset.sum());
    EXPECT_TRUE((root.shards_of(1)[0].grad() == 2).all().item<bool>());
    EXPECT_TRUE((root.shards_of(0)[0].grad() == 1).all().item<bool>());
  });
}

TEST(UnitSettingsTest, GathersAreLaunchedAheadAsListed) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net({4, 4, 4, 4, 4});
    ShardedRoot root(net.units(), group, {.prefetch_depth = 0});
    const auto ahead_of_a_step = [&](int step) {
      const int64_t before = root.statistics().ahead_gathers;
      train_step(root, net, rank, step);
      sgd(root.shards(), kRate);
      return root.statistics().ahead_gathers - before;
    };
    EXPECT_EQ(ahead_of_a_step(0), 0);
    root.settings(1).forward_prefetch = {2, 3};
    EXPECT_EQ(ahead_of_a_step(1), 2);
    root.settings(4).backward_prefetch = {3, 2};
    // Ranks that differ launch the same, at other times.
    if (rank == 1) root.settings(1).forward_prefetch = {};
    EXPECT_EQ(ahead_of_a_step(2), rank == 1 ? 2 : 4);
    EXPECT_EQ(root.statistics().late_gathers, 0);
  });
}

// Frozen at first: thawed, trained, frozen again, and partly so.
TEST(UnitSettingsTest, ParametersAreFrozenAndThawedBetweenSteps) {
  for (const int num_shards : {1, 2}) {
    run_ranks(2, [&](const Group& group) {
      const int rank = group->getRank();
      Net plain({4, 4, 4});
      Net net({4, 4, 4});
      net.blocks[1].weight.requires_grad_(false);
      net.blocks[1].bias.requires_grad_(false);
      Reference reference(plain);
      ShardedRoot root(net.units(), group, {.num_shards = num_shards});
      const auto set_trained = [&](bool first, bool weight, bool bias) {
        root.shards_of(1)[0].set_requires_grad(first);
        root.shards_of(2)[0].set_requires_grad(weight);
        root.shards_of(2)[1].set_requires_grad(bias);
      };
      const std::vector<std::vector<bool>> turns = {{true, false, false},
                                                    {true, true, true},
                                                    {false, true, false},
                                                    {false, false, true},
                                                    {true, false, false}};
      for (size_t step = 0; step < turns.size(); ++step) {
        const auto& turn = turns[step];
        set_trained(turn[0], turn[1], turn[2]);
        reference.accumulate(2, [&](int r) {
          return loss_of(plain.run(plain.input(r, static_cast<int>(step))));
        });
        train_step(root, net, rank, static_cast<int>(step));
        const std::vector<bool> is_trained = {true, turn[0], true, turn[1],
                                              turn[2]};
        for (size_t i = 0; i < is_trained.size(); ++i) {
          const at::Tensor shard = root.shards()[i];
          ASSERT_EQ(shard.grad().defined(), is_trained[i])
              << "step " << step << " parameter " << i;
          if (!is_trained[i]) {
            reference.gradients[i].zero_();
            continue;
          }
          const size_t unit = (i + 1) / 2;
          const at::Tensor expected =
              part_of(reference.gradients[i], root, unit,
                      i == 0 ? 0 : (i - 1) % 2, rank % num_shards);
          EXPECT_TRUE(at::equal(shard.grad().flatten(), expected));
        }
        reference.step(kRate);
        sgd(root.shards(), kRate);
      }
    });
  }
}

TEST(UnitSettingsTest, RanksThatFreezeDifferentlyRaiseTheSame) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net;
    ShardedRoot root(net.units(), group, {});
    if (rank == 1) root.shards_of(2)[0].set_requires_grad(false);
    try {
      train_step(root, net, rank, 0);
    } catch (const c10::Error& error) {
      texts[rank] = error.what_without_backtrace();
    }
    root.shards_of(2)[0].set_requires_grad(false);
    EXPECT_NO_THROW(train_step(root, net, rank, 1));
    EXPECT_FALSE(root.shards_of(2)[0].grad().defined());
    EXPECT_TRUE(root.shards_of(2)[1].grad().defined());
  });
  EXPECT_THAT(texts[0], Not(::testing::IsEmpty()));
  EXPECT_EQ(texts[0], texts[1]);
}

TEST(UnitSettingsTest, AllMayBeFrozen) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    for (const at::Tensor& shard : root.shards())
      shard.set_requires_grad(false);
    const at::Tensor loss = forward_loss(root, net, group->getRank(), 0);
    EXPECT_FALSE(loss.requires_grad());
    for (const at::Tensor& shard : root.shards()) shard.set_requires_grad(true);
    train_step(root, net, group->getRank(), 1);
    for (const at::Tensor& shard : root.shards()) {
      EXPECT_TRUE(shard.grad().defined());
    }
  });
}

TEST(UnitSettingsTest, WhatBackwardsHaveAddedUpIsReducedWithoutAnother) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net plain;
    Net net;
    Reference reference(plain);
    ShardedRoot root(net.units(), group, {});
    for (int step = 0; step < 3; ++step) {
      root.set_synchronizes(false);
      train_step(root, net, rank, step);
      for (const at::Tensor& shard : root.shards()) {
        EXPECT_FALSE(shard.grad().defined());
      }
      root.set_synchronizes(true);
      root.reduce();
      reference.accumulate(
          2, [&](int r) { return loss_of(plain.run(plain.input(r, step))); });
      expect_gradients(root, reference.gradients, rank);
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
  });
}

// Ranks have 5, 3 and 4 batches.
TEST(UnitSettingsTest, RanksMayRunOutOfData) {
  for (const bool divides_by_present : {false, true}) {
    run_ranks(3, [&](const Group& group) {
      const int rank = group->getRank();
      const std::vector<int> num_batches = {5, 3, 4};
      Net plain;
      Net net;
      Reference reference(plain);
      ShardedRoot root(net.units(), group, {});
      int step = 0;
      for (;; ++step) {
        const bool has_data = step < num_batches[rank];
        const int64_t present = root.num_ranks_with(has_data);
        if (present == 0) break;
        double factor = 1;
        if (divides_by_present) {
          factor = 3.0 / static_cast<double>(present);
          for (size_t unit = 0; unit < root.num_units(); ++unit) {
            root.settings(unit).gradient_divisor = static_cast<double>(present);
          }
        }
        reference.accumulate(3, [&](int r) {
          const at::Tensor loss = loss_of(plain.run(plain.input(r, step)));
          return step < num_batches[r] ? loss : loss * 0;
        });
        if (has_data) {
          train_step(root, net, rank, step);
        } else {
          root.step_without_data();
        }
        size_t index = 0;
        for (size_t unit = 0; unit < root.num_units(); ++unit) {
          for (size_t i = 0; i < root.shards_of(unit).size(); ++i, ++index) {
            const at::Tensor expected =
                part_of(reference.gradients[index], root, unit, i, rank);
            const at::Tensor found = root.shards_of(unit)[i].grad();
            ASSERT_TRUE(found.defined());
            if (divides_by_present) {
              EXPECT_TRUE(at::allclose(found.flatten(), expected * factor));
            } else {
              EXPECT_TRUE(at::equal(found.flatten(), expected));
            }
          }
        }
        for (at::Tensor& gradient : reference.gradients) gradient.mul_(factor);
        if (divides_by_present) {  // rounded elsewhere: goes on from the same
          for (const at::Tensor& shard : root.shards()) {
            shard.mutable_grad() = at::Tensor();
          }
        } else {
          reference.step(kRate);
          sgd(root.shards(), kRate);
        }
      }
      EXPECT_EQ(step, 5);
    });
  }
}

// Writes its gradient where it is to be reduced.
class TimesWeight : public torch::autograd::Function<TimesWeight> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, const at::Tensor& weight,
                            ShardedRoot* root, int64_t* num_in_place) {
    context->save_for_backward({x, weight});
    context->saved_data["root"] = reinterpret_cast<int64_t>(root);
    context->saved_data["count"] = reinterpret_cast<int64_t>(num_in_place);
    return x * weight;
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    auto* root =
        reinterpret_cast<ShardedRoot*>(context->saved_data["root"].toInt());
    at::Tensor slot = root->gradient_slot(saved[1]);
    if (slot.defined()) {
      at::mul_out(slot, gradients[0], saved[0]);
      ++*reinterpret_cast<int64_t*>(context->saved_data["count"].toInt());
    } else {
      slot = gradients[0] * saved[0];
    }
    return {gradients[0] * saved[1], slot, {}, {}};
  }
};

TEST(UnitSettingsTest, AFunctionMayWriteItsGradientWhereItIsReduced) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    at::Tensor weight = torch::full({5}, 2.0).requires_grad_();
    ShardedRoot root(
        std::vector<UnitSpec>{{.name = "", .parameters = {{"w", weight}}}},
        group, {});
    int64_t num_in_place = 0;
    for (int step = 0; step < 3; ++step) {
      root.forward([&] {
            return root.call(
                0, torch::full({5}, 1.0 + rank), [&](const at::Tensor& in) {
                  // Twice: the first in backward is written in place.
                  const at::Tensor once =
                      TimesWeight::apply(in, weight, &root, &num_in_place);
                  return TimesWeight::apply(once + 1, weight, &root,
                                            &num_in_place);
                });
          })
          .sum()
          .backward();
      EXPECT_EQ(num_in_place, step + 1);
      // d((x w + 1) w)/dw = 2 x w + 1, of x = 1 and 2.
      EXPECT_TRUE((root.shards()[0].grad() == 7).all().item<bool>())
          << root.shards()[0].grad();
      root.shards()[0].mutable_grad() = at::Tensor();
    }
    EXPECT_THROW(root.gradient_slot(torch::ones({5})), c10::ValueError);
  });
}

// Rows of four, and whole matrices of one rank each.
TEST(UnitSettingsTest, BlocksAreNotCut) {
  for (const int64_t block : {int64_t{4}, kWholeParameter}) {
    run_ranks(3, [&, block](const Group& group) {
      Net plain({5, 4, 4});
      Net net({5, 4, 4});
      Reference reference(plain);
      ShardedRoot root(net.units(), group,
                       {.block_numel_of = [&](const std::string& name,
                                              const at::Tensor& parameter) {
                         EXPECT_FALSE(name.empty());
                         return parameter.dim() == 2 ? block : 1;
                       }});
      for (int step = 0; step < 2; ++step) {
        reference.accumulate(
            3, [&](int r) { return loss_of(plain.run(plain.input(r, step))); });
        train_step(root, net, group->getRank(), step);
        expect_gradients(root, reference.gradients, group->getRank());
        for (size_t unit = 1; unit < root.num_units(); ++unit) {
          const int64_t held = root.shards_of(unit)[0].numel();
          EXPECT_TRUE(block == 4 ? held % 4 == 0
                                 : held == 0 || held == (unit == 1 ? 20 : 16))
              << held;
        }
        reference.step(kRate);
        sgd(root.shards(), kRate);
      }
    });
  }
}

TEST(UnitSettingsTest, ParametersMayBeSeenInDtypesOfTheirOwn) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group,
                     {.param_dtype = torch::kBFloat16,
                      .param_dtype_of = [](const std::string& name,
                                           const at::Tensor& parameter) {
                        const bool is_matrix = parameter.dim() == 2;
                        return is_matrix
                                   ? std::nullopt
                                   : std::optional(parameter.scalar_type());
                      }});
    const at::Tensor y = root.forward([&] {
      return root.call(0, net.input(0, 0), [&](const at::Tensor& in) {
        return root.call(1, in, [&](const at::Tensor& x) {
          EXPECT_EQ(net.blocks[0].weight.scalar_type(), torch::kBFloat16);
          EXPECT_EQ(net.blocks[0].bias.scalar_type(), torch::kFloat);
          return torch::matmul(x.to(torch::kBFloat16), net.blocks[0].weight)
                     .to(torch::kFloat) +
                 net.blocks[0].bias;
        }) * net.head;
      });
    });
    loss_of(y).backward();
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(root.shards_of(1)[i].grad().scalar_type(), torch::kFloat);
    }
    EXPECT_THAT(
        [&] {
          Net other;
          try {
            ShardedRoot refused(
                other.units(), group,
                {.block_numel_of = [&](const std::string&, const at::Tensor&) {
                  return int64_t{group->getRank()};
                }});
          } catch (const c10::ValueError& error) {
            return std::string(error.what_without_backtrace());
          }
          return std::string();
        }(),
        HasSubstr("blocks of"));
  });
}

// Several backwards without a step in between, of branches that differ, and a
// rank that runs out of data.
TEST(UnitSettingsTest, WhatStaysWholeBehindBackwardIsAlikeOnAllRanks) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net({4, 4, 4});
    ShardedRoot root(net.units(), group, {});
    root.shards_of(2)[0].set_requires_grad(false);
    root.shards_of(2)[1].set_requires_grad(false);
    for (size_t unit = 0; unit < root.num_units(); ++unit) {
      root.settings(unit).reshards_after_backward = false;
    }
    const std::vector<size_t> order =
        rank == 0 ? std::vector<size_t>{0, 1} : std::vector<size_t>{0};
    const auto step = [&](int index) {
      loss_of(root.forward([&] {
        return net.run(root, net.input(rank, index), order);
      })).backward();
    };
    step(0);
    step(1);
    sgd(root.shards(), kRate);
    step(2);
    root.unshard();
    root.reshard(/*writes=*/false);
    step(3);
    {
      const torch::NoGradGuard no_grad;
      root.forward([&] { return net.run(root, net.input(rank, 4), order); });
    }
    step(4);
    if (rank == 0) {
      step(5);
    } else {
      root.step_without_data();
    }
    step(6);
  });
}

TEST(UnitSettingsTest, WhatWasAddedUpOfAFrozenParameterIsDropped) {
  for (const bool rows_add_up : {false, true}) {
    run_ranks(2, [&](const Group& group) {
      at::Tensor first = torch::ones({3}).requires_grad_();
      at::Tensor second = torch::ones({3}).requires_grad_();
      ShardedRoot root(
          std::vector<UnitSpec>{
              {.name = "", .parameters = {{"a", first}, {"b", second}}}},
          group, {.num_shards = 1});
      const auto step = [&](double factor) {
        root.forward([&] {
              return root.call(0, torch::ones({1}), [&](const at::Tensor& in) {
                return (first * second * in).sum() * factor;
              });
            })
            .backward();
      };
      const auto set_adding_up = [&](bool value) {
        root.set_synchronizes(rows_add_up || !value);
        root.set_sums_over_replicas(!value);
      };
      set_adding_up(true);
      step(1000);
      root.shards()[1].set_requires_grad(false);
      set_adding_up(false);
      step(1);
      EXPECT_TRUE((root.shards()[0].grad() == 1001).all().item<bool>());
      EXPECT_FALSE(root.shards()[1].grad().defined());
      root.shards()[1].set_requires_grad(true);
      root.shards()[0].mutable_grad() = at::Tensor();
      step(1);
      EXPECT_TRUE((root.shards()[1].grad() == 1).all().item<bool>())
          << root.shards()[1].grad();
    });
  }
}

// Returns another view of where it has written.
class Transposing : public torch::autograd::Function<Transposing> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& weight, ShardedRoot* root) {
    context->save_for_backward({weight});
    context->saved_data["root"] = reinterpret_cast<int64_t>(root);
    return weight.t().clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    auto* root =
        reinterpret_cast<ShardedRoot*>(context->saved_data["root"].toInt());
    at::Tensor slot = root->gradient_slot(context->get_saved_variables()[0]);
    if (!slot.defined()) return {gradients[0].t(), {}};
    slot.copy_(gradients[0]);
    return {slot.t(), {}};
  }
};

TEST(UnitSettingsTest, AnotherViewOfTheSlotIsTransposedAsItSays) {
  run_ranks(1, [&](const Group& group) {
    at::Tensor weight = torch::ones({3, 3}).requires_grad_();
    ShardedRoot root(
        std::vector<UnitSpec>{{.name = "", .parameters = {{"w", weight}}}},
        group, {});
    const at::Tensor factors = torch::arange(9, torch::kFloat).view({3, 3});
    root.forward([&] {
          return root.call(0, torch::ones({1}), [&](const at::Tensor& in) {
            return (Transposing::apply(weight, &root) * factors * in).sum();
          });
        })
        .backward();
    EXPECT_TRUE(at::equal(root.shards()[0].grad(), factors.t()))
        << root.shards()[0].grad();
  });
}

TEST(UnitSettingsTest, NothingIsReducedWhileSynchronisationIsOff) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    root.set_synchronizes(false);
    train_step(root, net, group->getRank(), 0);
    EXPECT_THROW(root.reduce(), c10::Error);
    root.set_synchronizes(true);
    root.reduce();
    EXPECT_TRUE(root.shards()[0].grad().defined());
  });
}

}  // namespace unit_settings_test
}  // namespace brigade
