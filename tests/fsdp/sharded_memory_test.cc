// The memory that training takes is the planned one, and nothing is made after
// the second step. Nothing here waits for peers for long: groups answer at
// once, or reductions are never waited for.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/recording_group.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/hooks/checkpoint.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sharded_memory_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::sgd;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// From 4 on units may stay in slices on some of them.
constexpr int kNumShards[] = {2, 3, 4, 6};

class Draw {
 public:
  explicit Draw(uint64_t seed) : generator_(seed) {}

  int64_t between(int64_t first, int64_t last) {
    return first + static_cast<int64_t>(
                       generator_() % static_cast<uint64_t>(last - first + 1));
  }
  bool percent(int64_t chance) { return between(0, 99) < chance; }

 private:
  std::mt19937_64 generator_;
};

// A chain of units of any size, perhaps inside of an outermost one that is used
// before them, behind them or both.
class RandomChain {
 public:
  explicit RandomChain(uint64_t seed, int num_shards = 1)
      : draw_(seed), num_shards_(num_shards) {
    has_outermost_ = draw_.percent(60);
    const auto num_units = static_cast<size_t>(draw_.between(2, 7));
    for (size_t unit = 0; unit < num_units; ++unit) {
      add(unit);
      order_.push_back(unit);
    }
    const auto is_trained = [](const UnitSpec& spec) {
      return spec.parameters.front().tensor.requires_grad();
    };
    if (std::ranges::none_of(units, is_trained)) {
      units.back().parameters.front().tensor.set_requires_grad(true);
    }
    options.prefetch_depth = static_cast<size_t>(draw_.between(0, 3));
    options.max_reducing = static_cast<size_t>(draw_.between(1, 3));
    options.broadcasts_parameters = false;
    if (draw_.percent(30)) options.param_dtype = at::kBFloat16;
    if (draw_.percent(30)) options.reduce_dtype = at::kDouble;
  }

  // Between the root's construction and its first forward.
  void set(ShardedRoot& root) {
    for (size_t unit = 0; unit < units.size(); ++unit) {
      UnitSettings& settings = root.settings(unit);
      const bool is_trained =
          units[unit].parameters.front().tensor.requires_grad();
      if (is_trained && draw_.percent(15)) {
        settings.reshards_after_backward = false;
      }
      if (draw_.percent(10)) settings.forward_prefetch = {units.size() - 1};
      if (draw_.percent(10)) settings.backward_prefetch = {1};
    }
  }

  // Units are called in another order than they are listed in.
  void shuffle() {
    const size_t first = has_outermost_ ? 1 : 0;
    for (size_t place = units.size(); place-- > first + 1;) {
      std::swap(order_[place],
                order_[draw_.between(static_cast<int64_t>(first),
                                     static_cast<int64_t>(place))]);
    }
  }

  // Gradients of `num_batches` are added up, and reduced with the last.
  void step(ShardedRoot& root, int num_batches = 1) const {
    for (int batch = 1; batch <= num_batches; ++batch) {
      root.set_synchronizes(batch == num_batches);
      run_batch(root);
    }
    sgd(root.shards(), 0.25);
  }

  bool has_outermost() const { return has_outermost_; }

  // Whether backward reaches frozen units in front depends on when the
  // outermost one uses its own parameters: it is seen in the first step.
  bool is_seen_only() const {
    return has_outermost_ && units[0].parameters.front().tensor.requires_grad();
  }

  at::Tensor use(size_t unit, size_t parameter, const at::Tensor& h) const {
    const at::Tensor& tensor = units[unit].parameters[parameter].tensor;
    return torch::tanh(h * tensor.sum().to(at::kFloat));
  }

  std::vector<UnitSpec> units;
  ShardingOptions options;

 private:
  void run_batch(ShardedRoot& root) const {
    const auto inner = [&](at::Tensor h) {
      for (const size_t unit :
           order_ | std::views::drop(has_outermost_ ? 1 : 0)) {
        h = root.call(unit, h, [&](at::Tensor in) {
          for (size_t i = 0; i < units[unit].parameters.size(); ++i) {
            in = use(unit, i, in);
          }
          return in;
        });
      }
      return h;
    };
    const at::Tensor x = torch::ones({2});
    const at::Tensor loss = root.forward([&] {
      if (!has_outermost_) return inner(x).sum();
      return root.call(0, x, [&](at::Tensor in) {
        const size_t num_before = units[0].parameters.size() / 2;
        for (size_t i = 0; i < num_before; ++i) in = use(0, i, in);
        in = inner(in);
        for (size_t i = num_before; i < units[0].parameters.size(); ++i) {
          in = use(0, i, in);
        }
        return in.sum();
      });
    });
    loss.backward();
  }

  void add(size_t unit) {
    const bool is_outermost = has_outermost_ && unit == 0;
    const bool is_frozen = draw_.percent(25);
    UnitSpec spec = {.name = is_outermost ? "" : absl::StrCat("u", unit),
                     .parameters = {}};
    const int64_t num_parameters = draw_.between(1, 3);
    for (int64_t i = 0; i < num_parameters; ++i) {
      const bool is_double = draw_.percent(20);
      at::Tensor tensor = torch::full({draw_.between(1, 60)}, 0.25,
                                      is_double ? at::kDouble : at::kFloat);
      // Others of a trained unit may be frozen too, as with adapters.
      const bool is_other = i > 0 && draw_.percent(20);
      tensor.set_requires_grad(!is_frozen && !is_other);
      spec.parameters.push_back({absl::StrCat("p", unit, ".", i), tensor});
    }
    if (draw_.percent(is_outermost ? 70 : 25)) {
      spec.reshards_after_forward = false;
    }
    if (num_shards_ % 2 == 0 && num_shards_ > 2 && draw_.percent(50)) {
      spec.reshards_to = draw_.percent(50) ? num_shards_ / 2 : 2;
    }
    units.push_back(std::move(spec));
  }

  Draw draw_;
  const int num_shards_;
  bool has_outermost_ = false;
  std::vector<size_t> order_;  // in which units are called
};

// Steps that are all alike: forwards which call units of a chain any number of
// times, some inside of others, some in checkpoints, in front of one backward
// or of several, with evaluations and units made whole by hand in between.
class RandomProgram {
 public:
  RandomProgram(const RandomChain& chain, uint64_t seed)
      : chain_(chain), draw_(seed) {
    forwards_.resize(draw_.between(1, 3));
    for (Forward& forward : forwards_) {
      for (int64_t i = draw_.between(1, 2 * last_unit() + 1); i > 0; --i) {
        forward.calls.push_back(draw_call());
      }
      forward.num_checkpointed = draw_.percent(30) ? draw_.between(1, 3) : 0;
      forward.evaluates_before =
          &forward != &forwards_.front() && draw_.percent(20);
      forward.unshards_first = draw_.percent(15);
      forward.is_reduced = draw_.percent(70);
    }
    forwards_.back().is_reduced = true;
    has_one_backward_ = draw_.percent(50);
    inputs_take_gradients_ = draw_.percent(50);
  }

  void step(ShardedRoot& root) const {
    std::vector<at::Tensor> losses;
    for (const Forward& forward : forwards_) {
      if (forward.evaluates_before) {
        const at::NoGradGuard no_grad;
        run(root, forward);
      }
      losses.push_back(run(root, forward));
    }
    if (has_one_backward_) {
      backward(torch::stack(losses).sum(), root);
    } else {
      for (size_t i = 0; i < losses.size(); ++i) {
        root.set_synchronizes(forwards_[i].is_reduced);
        backward(losses[i], root);
      }
    }
    sgd(root.shards(), 0.25);
  }

 private:
  struct Call {
    size_t unit;
    std::optional<size_t> inner = std::nullopt;  // a unit that is called inside
  };
  struct Forward {
    std::vector<Call> calls;
    int64_t num_checkpointed = 0;  // of the first ones, all in one
    bool evaluates_before = false;
    bool unshards_first = false;  // the unit of the first call, by hand
    bool is_reduced = true;       // its backward, if each has one
  };

  int64_t first_unit() const { return chain_.has_outermost() ? 1 : 0; }
  int64_t last_unit() const {
    return static_cast<int64_t>(chain_.units.size()) - 1;
  }

  Call draw_call() {
    Call call = {static_cast<size_t>(draw_.between(first_unit(), last_unit()))};
    if (draw_.percent(20)) {
      const auto inner =
          static_cast<size_t>(draw_.between(first_unit(), last_unit()));
      if (inner != call.unit) call.inner = inner;
    }
    return call;
  }

  // Also of what has no gradients, as frozen units.
  static void backward(const at::Tensor& loss, ShardedRoot& root) {
    if (loss.requires_grad()) {
      loss.backward();
    } else if (root.synchronizes()) {
      root.reduce();
    }
  }

  at::Tensor run(ShardedRoot& root, const Call& called,
                 const at::Tensor& h) const {
    return root.call(called.unit, h, [&](at::Tensor in) {
      for (size_t i = 0; i < chain_.units[called.unit].parameters.size(); ++i) {
        in = chain_.use(called.unit, i, in);
        if (i == 0 && called.inner) in = run(root, Call{*called.inner}, in);
      }
      return in;
    });
  }

  at::Tensor run(ShardedRoot& root, const Forward& forward) const {
    const auto inner = [&](at::Tensor h) {
      if (forward.unshards_first) root.unshard(forward.calls.front().unit);
      const auto num_first =
          std::min<ptrdiff_t>(forward.num_checkpointed,
                              static_cast<ptrdiff_t>(forward.calls.size()));
      const auto begin = forward.calls.begin();
      const auto run_first =
          [this, &root,
           first = std::vector(begin, begin + num_first)](at::Tensor in) {
            for (const Call& called : first) in = run(root, called, in);
            return in;
          };
      if (num_first > 0) h = checkpoint(run_first, h);
      for (const Call& called : forward.calls | std::views::drop(num_first)) {
        h = run(root, called, h);
      }
      return h;
    };
    const at::Tensor x =
        torch::ones({2}).requires_grad_(inputs_take_gradients_);
    return root.forward([&] {
      if (!chain_.has_outermost()) return inner(x).sum();
      return root.call(0, x, [&](const at::Tensor& in) {
        return chain_.use(0, 0, inner(in)).sum();
      });
    });
  }

  const RandomChain& chain_;
  Draw draw_;
  std::vector<Forward> forwards_;
  bool has_one_backward_ = true;
  bool inputs_take_gradients_ = false;
};

// Of seeds from 0 on, each with one of the numbers of ranks, until one fails.
template <typename Check>
void for_random_chains(uint64_t num_seeds, const Check& check) {
#ifdef __SANITIZE_ADDRESS__
  num_seeds /= 16;  // the release build plans them all
#endif
  for (uint64_t seed = 0; seed < num_seeds && !::testing::Test::HasFailure();
       ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    const int num_shards = kNumShards[seed % 4];
    const RecordingGroup recording(num_shards);
    RandomChain chain(seed, num_shards);
    check(chain, recording.group(), seed);
  }
}

void expect_planned(RandomChain& chain, const Group& group) {
  ShardedRoot root(chain.units, group, chain.options);
  chain.set(root);
  const int64_t planned = root.statistics().planned_bytes;
  EXPECT_EQ(root.statistics().peak_whole_bytes, 0);
  EXPECT_THAT(root.explain(),
              AllOf(HasSubstr(absl::StrCat("take ", planned, " bytes by plan")),
                    HasSubstr("the next forward gathers ['")));
  int64_t allocations = 0;
  for (int step = 0; step < 4; ++step) {
    chain.step(root);
    if (step == 1) allocations = root.statistics().allocations;
  }
  const ShardingStatistics statistics = root.statistics();
  if (chain.is_seen_only()) {
    EXPECT_LE(statistics.planned_bytes, planned);
    EXPECT_LE(statistics.peak_whole_bytes, planned);
  } else {
    EXPECT_EQ(statistics.planned_bytes, planned);
    EXPECT_EQ(statistics.peak_whole_bytes, planned);
  }
  EXPECT_EQ(statistics.whole_bytes, statistics.planned_bytes);
  EXPECT_EQ(statistics.unplanned, 0);
  EXPECT_EQ(statistics.allocations, allocations);
  EXPECT_EQ(statistics.late_gathers, 0);
}

TEST(ShardedMemoryTest, IsThePlannedOne) {
  for_random_chains(
      400, [&](RandomChain& chain, const Group& group, uint64_t /*seed*/) {
        expect_planned(chain, group);
      });
}

// The order of units is known behind the first step.
TEST(ShardedMemoryTest, IsPlannedAnewForTheOrderInWhichUnitsAreCalled) {
  int64_t num_smaller = 0;
  for_random_chains(
      400, [&](RandomChain& chain, const Group& group, uint64_t /*seed*/) {
        chain.shuffle();
        ShardedRoot root(chain.units, group, chain.options);
        chain.step(root);
        const ShardingStatistics first = root.statistics();
        chain.step(root);
        const ShardingStatistics second = root.statistics();
        for (int step = 0; step < 3; ++step) chain.step(root);
        const ShardingStatistics statistics = root.statistics();
        EXPECT_EQ(statistics.whole_bytes, statistics.planned_bytes);
        EXPECT_EQ(statistics.unplanned, first.unplanned);
        EXPECT_EQ(statistics.allocations, second.allocations);
        if (statistics.whole_bytes < first.whole_bytes) ++num_smaller;
      });
  EXPECT_GT(num_smaller, 0);
}

// Also of a rank that has no data, which gathers for its peers and adds zeros,
// where the outermost unit alone stays whole.
TEST(ShardedMemoryTest, IsThePlannedOneWithoutData) {
  for_random_chains(
      200, [&](RandomChain& chain, const Group& group, uint64_t seed) {
        for (UnitSpec& spec : chain.units) {
          spec.reshards_after_forward = !spec.name.empty();
        }
        ShardedRoot root(chain.units, group, chain.options);
        for (int step = 0; step < 4; ++step) {
          root.step_without_data();
          if (seed % 2 == 1) chain.step(root);
        }
        const ShardingStatistics statistics = root.statistics();
        EXPECT_EQ(statistics.peak_whole_bytes, statistics.planned_bytes);
        EXPECT_EQ(statistics.unplanned, 0);
        EXPECT_EQ(statistics.late_gathers, 0);
      });
}

// Known before the first forward, or from where it is first done.
TEST(ShardedMemoryTest, IsThePlannedOneWhereGradientsAreAddedUp) {
  for_random_chains(
      400, [&](RandomChain& chain, const Group& group, uint64_t seed) {
        ShardedRoot root(chain.units, group, chain.options);
        const bool from_the_first = seed % 8 < 4;
        if (from_the_first) root.set_synchronizes(false);
        const int64_t planned = root.statistics().planned_bytes;
        if (!from_the_first) chain.step(root);
        int64_t allocations = 0;
        for (int step = 0; step < 4; ++step) {
          chain.step(root, /*num_batches=*/2 + step % 2);
          if (step == 1) allocations = root.statistics().allocations;
        }
        const ShardingStatistics statistics = root.statistics();
        if (from_the_first && chain.is_seen_only()) {
          EXPECT_LE(statistics.planned_bytes, planned);
          EXPECT_LE(statistics.peak_whole_bytes, planned);
        } else if (from_the_first) {
          EXPECT_EQ(statistics.planned_bytes, planned);
          EXPECT_EQ(statistics.peak_whole_bytes, planned);
        }
        if (from_the_first) EXPECT_EQ(statistics.unplanned, 0);
        EXPECT_EQ(statistics.whole_bytes, statistics.planned_bytes);
        EXPECT_EQ(statistics.allocations, allocations);
        EXPECT_EQ(statistics.late_gathers, 0);
      });
}

// Of equal units whose gradients were added up, and are all there: beside them
// one unit is whole at a time.
TEST(ShardedMemoryTest, IsThePlannedOneWhereNoBackwardReduces) {
  constexpr size_t kNumUnits = 6;
  constexpr int64_t kBytes = 256;
  for (const bool resharded : {false, true}) {
    const RecordingGroup recording(2);
    std::vector<at::Tensor> weights;
    std::vector<UnitSpec> units;
    for (size_t u = 0; u < kNumUnits; ++u) {
      weights.push_back(torch::ones({kBytes / 4}).requires_grad_());
      units.push_back({.name = absl::StrCat(u),
                       .parameters = {{"w", weights.back()}},
                       .reshards_after_forward = resharded || u > 0});
    }
    ShardedRoot root(units, recording.group(),
                     {.prefetch_depth = 0, .max_reducing = kNumUnits});
    for (int step = 0; step < 3; ++step) {
      root.set_synchronizes(false);
      const at::Tensor loss = root.forward([&] {
        at::Tensor h = torch::ones({kBytes / 4});
        for (size_t u = 0; u < kNumUnits; ++u) {
          h = root.call(u, h,
                        [&](const at::Tensor& in) { return in * weights[u]; });
        }
        return h.sum();
      });
      loss.backward();
      root.set_synchronizes(true);
      root.reduce();
      EXPECT_TRUE((root.shards()[0].grad() == 1 + step).all().item<bool>());
    }
    const ShardingStatistics statistics = root.statistics();
    EXPECT_EQ(statistics.peak_whole_bytes, statistics.planned_bytes);
    EXPECT_EQ(statistics.unplanned, 0);
    EXPECT_EQ(statistics.late_gathers, 0);
  }
}

// In place of LibTorch's for its lifetime: counts what is large.
class LargeAllocations final : public c10::Allocator {
 public:
  explicit LargeAllocations(size_t min_bytes)
      : min_bytes_(min_bytes), base_(*c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this, kPriority);
  }
  ~LargeAllocations() override { c10::SetCPUAllocator(&base_, kPriority); }
  LargeAllocations(const LargeAllocations&) = delete;
  LargeAllocations& operator=(const LargeAllocations&) = delete;

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes >= min_bytes_) ++count_;
    return base_.allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return base_.raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    base_.copy_data(to, from, bytes);
  }

  int64_t count() const { return count_; }

 private:
  static constexpr uint8_t kPriority = 1;

  const size_t min_bytes_;
  c10::Allocator& base_;
  std::atomic<int64_t> count_ = 0;
};

// Not of the pool, and of nobody else: what a block computes with is smaller
// than its unit.
TEST(ShardedMemoryTest, NobodyAllocatesAUnitBehindTheSecondStep) {
  constexpr int64_t kSize = 64;
  constexpr size_t kUnitBytes = (kSize * kSize + kSize) * 4;
  for (const bool resharded : {true, false}) {
    LargeAllocations large(kUnitBytes);
    std::atomic<int64_t> of_two_steps = 0;
    run_ranks(2, [&](const Group& group) {
      testing::Net net({kSize, kSize, kSize, kSize, kSize});
      ShardedRoot root(net.units(), group,
                       {.reshards_after_forward = resharded});
      for (int step = 0; step < 6; ++step) {
        if (step == 2) {  // no rank is in the third one yet, or in the second
          root.meet_peers();
          of_two_steps = large.count();
          root.meet_peers();
        }
        for (const at::Tensor& shard : root.shards())
          shard.mutable_grad().reset();
        testing::loss_of(root.forward([&] {
          return net.run(root, net.input(group->getRank(), step));
        })).backward();
      }
    });
    EXPECT_GT(of_two_steps, 0);
    EXPECT_EQ(large.count(), of_two_steps);
  }
}

// As many reductions as there are may keep their memory: how long peers take
// makes no difference.
TEST(ShardedMemoryTest, IsThePlannedOneOnMeshes) {
  for (const auto& [world_size, num_shards] :
       {std::pair(4, 4), std::pair(4, 2), std::pair(2, 1), std::pair(2, 2),
        std::pair(1, 1)}) {
    run_ranks(world_size, [&, shards = num_shards](const Group& group) {
      for (uint64_t seed = 0; seed < 10; ++seed) {
        SCOPED_TRACE(absl::StrCat("seed ", seed, ", ", shards, " shards"));
        RandomChain chain(seed, shards);
        chain.options.num_shards = shards;
        chain.options.max_reducing = 100;
        expect_planned(chain, group);
      }
    });
  }
}

// Two buffers, as in YaFSDP, and one for each unit that is kept. The gradient,
// of the first unit alone, comes when others are over.
TEST(ShardedMemoryTest, EqualUnitsTakeTwoBuffersAndWhatIsKept) {
  constexpr int64_t kBytes = 256;
  constexpr size_t kNumUnits = 6;
  for (const size_t num_kept : {0, 1, 3}) {
    const RecordingGroup recording(2);
    std::vector<at::Tensor> weights;
    std::vector<UnitSpec> units;
    for (size_t u = 0; u < kNumUnits; ++u) {
      weights.push_back(torch::ones({kBytes / 4}).requires_grad_(u == 0));
      units.push_back({.name = absl::StrCat(u),
                       .parameters = {{"w", weights.back()}},
                       .reshards_after_forward = u < 2 || u >= 2 + num_kept});
    }
    ShardedRoot root(units, recording.group(),
                     {.prefetch_depth = 1, .max_reducing = 1});
    for (int step = 0; step < 3; ++step) {
      root.forward([&] {
            at::Tensor h = torch::ones({kBytes / 4});
            for (size_t u = 0; u < kNumUnits; ++u) {
              h = root.call(
                  u, h, [&](const at::Tensor& in) { return in * weights[u]; });
            }
            return h.sum();
          })
          .backward();
    }
    EXPECT_EQ(root.statistics().peak_whole_bytes,
              static_cast<int64_t>(2 + num_kept) * kBytes);
    EXPECT_EQ(root.statistics().unplanned, 0);
  }
}

// Beside two whole units, a slice of half of each: but for the last, whose
// slice is where no other unit is whole. The gradient is of the first unit
// alone.
TEST(ShardedMemoryTest, SlicesTakeTheirPartOfEachUnit) {
  constexpr int64_t kBytes = 256;
  constexpr size_t kNumUnits = 6;
  const RecordingGroup recording(4);
  std::vector<at::Tensor> weights;
  std::vector<UnitSpec> units;
  for (size_t u = 0; u < kNumUnits; ++u) {
    weights.push_back(torch::ones({kBytes / 4}).requires_grad_(u == 0));
    units.push_back(
        {.name = absl::StrCat(u), .parameters = {{"w", weights.back()}}});
  }
  ShardedRoot root(units, recording.group(),
                   {.reshards_to = 2, .prefetch_depth = 1, .max_reducing = 1});
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = root.forward([&] {
      at::Tensor h = torch::ones({kBytes / 4});
      for (size_t u = 0; u < kNumUnits; ++u) {
        h = root.call(u, h,
                      [&](const at::Tensor& in) { return in * weights[u]; });
      }
      return h.sum();
    });
    loss.backward();
  }
  const ShardingStatistics statistics = root.statistics();
  EXPECT_EQ(statistics.peak_whole_bytes,
            2 * kBytes + static_cast<int64_t>(kNumUnits - 1) * kBytes / 2);
  EXPECT_EQ(statistics.planned_bytes, statistics.peak_whole_bytes);
  EXPECT_EQ(statistics.unplanned, 0);
  EXPECT_EQ(statistics.near_gathers, 3 * static_cast<int64_t>(kNumUnits));
}

// Whatever steps do, if they all do the same.
void expect_planned_as_recorded(RandomChain& chain, const Group& group,
                                uint64_t seed) {
  const RandomProgram program(chain, 1'000 + seed);
  ShardedRoot root(chain.units, group, chain.options);
  if (seed % 2 == 1) chain.set(root);
  // Its memory may be that of a larger use, for ever.
  const bool has_own_storage = seed % 5 == 0;
  root.settings(chain.units.size() - 1).keeps_storage = has_own_storage;
  for (int step = 0; step < 4; ++step) program.step(root);
  const ShardingStatistics fourth = root.statistics();
  for (int step = 0; step < 4; ++step) program.step(root);
  const ShardingStatistics statistics = root.statistics();
  if (!has_own_storage) {
    EXPECT_EQ(statistics.whole_bytes, statistics.planned_bytes);
  }
  EXPECT_EQ(statistics.unplanned, fourth.unplanned);
  EXPECT_EQ(statistics.allocations, fourth.allocations);
  EXPECT_THAT(root.explain(),
              HasSubstr(absl::StrCat("take ", statistics.planned_bytes,
                                     " bytes by plan")));
}

TEST(ShardedMemoryTest, IsThePlannedOneOfAnySteps) {
  for_random_chains(400,
                    [&](RandomChain& chain, const Group& group, uint64_t seed) {
                      expect_planned_as_recorded(chain, group, seed);
                    });
}

// However long peers take for a sum.
TEST(ShardedMemoryTest, IsThePlannedOneOfAnyStepsOfRanks) {
  run_ranks(4, [&](const Group& group) {
    for (uint64_t seed = 0; seed < 25; ++seed) {
      SCOPED_TRACE(absl::StrCat("seed ", seed));
      RandomChain chain(seed, 4);
      chain.options.max_reducing = 100;
      expect_planned_as_recorded(chain, group, seed);
    }
  });
}

// Steps of a chain, some with all units whole at once.
class WholeAtTimes {
 public:
  WholeAtTimes() : root_(net_.units(), recording_.group(), {}) {}

  void step(bool is_whole) {
    input_ = net_.input(0, 0).requires_grad_();
    const at::Tensor output = root_.forward([&] {
      for (size_t unit = 0; is_whole && unit < root_.num_units(); ++unit) {
        root_.unshard(unit);
      }
      return net_.run(root_, input_);
    });
    loss_ = output.sum();
    loss_.backward({}, /*retain_graph=*/true);
  }
  // Of the last step, with respect to its input.
  void differentiate() { torch::autograd::grad({loss_}, {input_}); }
  ShardedRoot& root() { return root_; }
  int64_t planned() const { return root_.statistics().planned_bytes; }
  int64_t taken() const { return root_.statistics().whole_bytes; }

 private:
  const RecordingGroup recording_{2};
  const testing::Net net_{std::vector<int64_t>(9, 5)};
  ShardedRoot root_;
  at::Tensor input_;
  at::Tensor loss_;
};

// A model of which one block in eight is used, in each forward another one, as
// adapters: what is left out is gathered for peers, and not all at once.
TEST(ShardedMemoryTest, WhatAForwardLeavesOutIsNotThereAtOnce) {
  const std::vector<int64_t> sizes(9, 8);
  for (const size_t depth : {0, 1, 3}) {
    run_ranks(2, [&](const Group& group) {
      testing::Net net(sizes);
      ShardedRoot root(
          net.units(), group,
          {.prefetch_depth = depth, .broadcasts_parameters = false});
      const int64_t of_block = root.unit(1).segments.front()->whole_bytes();
      for (int step = 0; step < 12; ++step) {
        const std::vector<size_t> order = {static_cast<size_t>(step / 3 % 8)};
        const bool is_trained = step % 3 > 0;
        const torch::AutoGradMode grad_mode(is_trained);
        const at::Tensor y = root.forward(
            [&] { return net.run(root, net.input(0, step), order); });
        if (is_trained) y.sum().backward();
        // The block's own, with its gradients, and those that are left out.
        EXPECT_LT(root.statistics().peak_whole_bytes,
                  static_cast<int64_t>(depth + 5) * of_block)
            << depth << ' ' << step;
      }
      EXPECT_GT(root.statistics().unneeded_gathers, 12 * 5);
    });
  }
}

// This and that in turns has memory beside the plan, and is not planned anew
// each time; the same twice is, and less, if it is so for long.
TEST(ShardedMemoryTest, StepsThatDifferInTurnsAreNotPlannedAnew) {
  WholeAtTimes program;
  for (int i = 0; i < 4; ++i) program.step(/*is_whole=*/false);
  const int64_t of_calls = program.planned();
  for (int i = 0; i < 10; ++i) {
    program.step(/*is_whole=*/i % 2 == 0);
    EXPECT_EQ(program.planned(), of_calls);
  }
  EXPECT_GT(program.root().statistics().unplanned, 0);
  for (int i = 0; i < 3; ++i) program.step(/*is_whole=*/true);
  const int64_t of_whole = program.planned();
  EXPECT_GT(of_whole, of_calls);
  EXPECT_EQ(program.taken(), of_whole);
  for (int i = 0; i < 12; ++i) {
    program.step(/*is_whole=*/i % 4 < 2);
    EXPECT_EQ(program.planned(), of_whole);
  }
  for (int i = 0; i < 10; ++i) program.step(/*is_whole=*/false);
  EXPECT_EQ(program.planned(), of_calls);
  EXPECT_EQ(program.taken(), of_calls);
}

// What is done once between steps, and by evaluations, is no part of a step.
TEST(ShardedMemoryTest, WhatIsBetweenStepsIsNotPlanned) {
  WholeAtTimes program;
  const int64_t planned = program.planned();
  const auto between = [&] {
    program.root().unshard();
    program.root().reshard(/*writes=*/false);
    const at::NoGradGuard no_grad;
    program.root().forward([&] {
      for (size_t unit = 0; unit < program.root().num_units(); ++unit) {
        program.root().unshard(unit);
      }
      return 0;
    });
  };
  for (int i = 0; i < 6; ++i) {
    if (i > 0) program.differentiate();
    between();
    program.step(/*is_whole=*/false);
    EXPECT_EQ(program.planned(), planned);
  }
  program.step(/*is_whole=*/false);
  program.step(/*is_whole=*/false);
  EXPECT_EQ(program.taken(), planned);
}

// Units that stay whole give their memory back behind the plan that is made
// while they are: it is taken again, by themselves.
TEST(ShardedMemoryTest, UnitsThatStayWholeAreNotThereTwice) {
  for (const bool steps_at_first : {true, false}) {
    const RecordingGroup recording(2);
    const testing::Net net(std::vector<int64_t>(7, 5));
    ShardedRoot root(net.units(), recording.group(),
                     shard_optimizer_state({.trusts_versions = true}));
    const auto train = [&](bool steps) {
      testing::loss_of(root.forward([&] {
        return net.run(root, net.input(0, 0), {3, 1, 0, 5, 2, 4});
      })).backward();
      if (steps) sgd(root.shards(), 0.25);
    };
    for (int step = 0; step < 6; ++step) train(steps_at_first || step > 1);
    EXPECT_EQ(root.statistics().peak_whole_bytes,
              root.statistics().planned_bytes);
    EXPECT_EQ(root.statistics().whole_bytes, root.statistics().planned_bytes);
    EXPECT_EQ(root.statistics().unplanned, 0);
  }
}

// A gradient with respect to something else is no end of a step, which has
// another forward.
TEST(ShardedMemoryTest, ABackwardThatReturnsGradientsIsPartOfAStep) {
  const RecordingGroup recording(2);
  const testing::Net net(std::vector<int64_t>(9, 5));
  ShardedRoot root(net.units(), recording.group(), {});
  const auto step = [&] {
    const at::Tensor x = net.input(0, 0).requires_grad_();
    const at::Tensor first =
        root.forward([&] { return net.run(root, x); }).sum();
    torch::autograd::grad({first}, {x}, {}, /*retain_graph=*/true);
    const at::Tensor second = root.forward([&] {
      for (size_t unit = 0; unit < root.num_units(); ++unit) root.unshard(unit);
      return net.run(root, x);
    });
    (first + second.sum()).backward();
  };
  for (int i = 0; i < 4; ++i) step();
  const ShardingStatistics fourth = root.statistics();
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(root.statistics().allocations, fourth.allocations);
  EXPECT_EQ(root.statistics().whole_bytes, root.statistics().planned_bytes);
}

// A program that is not as expected has memory beside the plan, and says so.
TEST(ShardedMemoryTest, OtherProgramsAreCounted) {
  const RecordingGroup recording(2);
  const testing::Net net;
  ShardedRoot root(net.units(), recording.group(), {.max_reducing = 1});
  const auto forward = [&] {
    return testing::loss_of(
        root.forward([&] { return net.run(root, net.input(0, 0)); }));
  };
  // Keeps the gradients of all units, and says so behind forward only.
  const auto add_up = [&] {
    const at::Tensor loss = forward();
    root.set_synchronizes(false);
    loss.backward();
    root.set_synchronizes(true);
  };
  forward().backward();
  EXPECT_EQ(root.statistics().unplanned, 0);
  add_up();
  EXPECT_GT(root.statistics().unplanned, 0);
  EXPECT_GT(root.statistics().peak_whole_bytes,
            root.statistics().planned_bytes);
  forward().backward();
  const int64_t unplanned = root.statistics().unplanned;
  add_up();  // as the plan has it from here on
  forward().backward();
  EXPECT_EQ(root.statistics().unplanned, unplanned);
  EXPECT_EQ(root.statistics().whole_bytes, root.statistics().planned_bytes);
}

TEST(ShardedMemoryTest, SettingsBeforeTheFirstForwardArePlannedFor) {
  const RecordingGroup recording(2);
  const testing::Net net;
  ShardedRoot root(net.units(), recording.group(), {.max_reducing = 1});
  const int64_t planned = root.statistics().planned_bytes;
  root.set_max_reducing(3);
  const int64_t for_three = root.statistics().planned_bytes;
  EXPECT_GT(for_three, planned);
  testing::loss_of(root.forward([&] {
    return net.run(root, net.input(0, 0));
  })).backward();
  root.set_max_reducing(1);
  EXPECT_EQ(root.statistics().planned_bytes, for_three);
  EXPECT_EQ(root.statistics().peak_whole_bytes, for_three);
}

}  // namespace sharded_memory_test
}  // namespace brigade
