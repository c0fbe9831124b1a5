// Sharded training on every layout of streams: what is gathered, computed,
// summed and delivered is ordered, and memory is lent again only behind that.

#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/fsdp/units/reduction_hook.h"
#include "brigade/tests/simulated_device/sharded_training.h"
#include "brigade/tests/support/simulated_device/ordering_calls.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::all_stream_layouts;
using testing::on_every_layout;
using testing::ShardedProgram;
using testing::ShardedTraining;
using testing::StreamLayout;

// Shards, kept from forward to backward, prefetch depth, calls on own streams,
// neighbours that keep slices (0: none do).
class FsdpStreamsTest : public simulated::StreamTest,
                        public ::testing::WithParamInterface<
                            std::tuple<int, bool, int, bool, int>> {
 protected:
  static ShardingOptions options() {
    const int neighbours = std::get<4>(GetParam());
    return {.num_shards = std::get<0>(GetParam()),
            .reshards_after_forward = !std::get<1>(GetParam()),
            .reshards_to =
                neighbours > 0 ? std::optional(neighbours) : std::nullopt,
            .prefetch_depth = static_cast<size_t>(std::get<2>(GetParam()))};
  }
  static ShardedProgram program() {
    return {.calls_on_own_stream = std::get<3>(GetParam())};
  }
};

void train(ShardedTraining& training, int num_steps) {
  const int64_t before = training.root().engine_statistics().reduced;
  for (int s = 0; s < num_steps; ++s) {
    training.step(s);
    training.expect_gradients(s);
    training.update();
    training.zero_grad();
  }
  EXPECT_EQ(training.root().engine_statistics().reduced - before, num_steps);
}

TEST_P(FsdpStreamsTest, Trains) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    train(training, 2);
    const int64_t allocations = training.root().statistics().allocations;
    train(training, 2);
    const ShardingStatistics statistics = training.root().statistics();
    EXPECT_EQ(statistics.allocations, allocations);
    EXPECT_EQ(statistics.late_gathers, 0);
    // An outermost unit that is not kept is not planned for.
    if (options().reshards_after_forward) return;
    EXPECT_EQ(statistics.unplanned, 0);
    EXPECT_EQ(statistics.peak_whole_bytes, statistics.planned_bytes);
  });
}

INSTANTIATE_TEST_SUITE_P(, FsdpStreamsTest,
                         ::testing::Values(std::tuple(4, false, 0, false, 0),
                                           std::tuple(4, true, 1, true, 0),
                                           std::tuple(4, false, 2, true, 0),
                                           std::tuple(2, true, 0, true, 0),
                                           std::tuple(2, false, 1, false, 0),
                                           std::tuple(2, true, 2, false, 0),
                                           std::tuple(1, false, 0, true, 0),
                                           std::tuple(1, true, 1, false, 0),
                                           std::tuple(1, true, 2, true, 0)));
INSTANTIATE_TEST_SUITE_P(InSlices, FsdpStreamsTest,
                         ::testing::Values(std::tuple(4, false, 0, true, 2),
                                           std::tuple(4, false, 1, false, 2),
                                           std::tuple(4, false, 2, true, 2)));

using OtherFsdpStreamsTest = FsdpStreamsTest;

TEST_P(OtherFsdpStreamsTest, TrainsInLowerPrecision) {
  for (const at::ScalarType reduce : {at::kFloat, at::kBFloat16}) {
    ShardingOptions mixed = options();
    mixed.param_dtype = at::kBFloat16;
    mixed.reduce_dtype = reduce;
    on_every_layout(mixed, program(),
                    [](ShardedTraining& training) { train(training, 3); });
  }
}

// Every other backward sums over rows alone.
void train_by_rows(ShardedTraining& training) {
  for (int s = 0; s < 2; ++s) {
    training.root().set_sums_over_replicas(false);
    training.step(s);
    training.root().set_sums_over_replicas(true);
    training.step(s);
    training.expect_gradients(s, 2);
    training.update();
    training.zero_grad();
  }
}

// What travels is in other memory than what it was made of, and becomes that
// again. Rows add up what has arrived.
TEST_P(OtherFsdpStreamsTest, TravelsInLowerPrecision) {
  for (const at::ScalarType wire : {at::kHalf, at::kBFloat16}) {
    ShardingOptions compressed = options();
    compressed.comm_hook = compression_hook(wire);
    on_every_layout(compressed, program(), [](ShardedTraining& training) {
      train(training, 3);
      train_by_rows(training);
    });
  }
}

// Each rank adds up what it gets, and so does each column.
TEST_P(OtherFsdpStreamsTest, AddsUpInTheOrderOfTheRanks) {
  for (const at::ScalarType reduce : {at::kFloat, at::kBFloat16}) {
    ShardingOptions in_order = options();
    in_order.reproducible = true;
    in_order.reduce_dtype = reduce;
    on_every_layout(in_order, program(), [](ShardedTraining& training) {
      train(training, 3);
      train_by_rows(training);
    });
  }
}

// It need not know that no transport of a device scales.
TEST_P(OtherFsdpStreamsTest, PassesGradientsToAHookOfOnesOwn) {
  class Passing : public ReductionHook {
   public:
    FuturePtr reduce(ShardTransport& transport,
                     const Reduction& reduction) override {
      return transport.reduce_scatter(reduction.whole, reduction.shard,
                                      reduction.sum);
    }
    std::string hook_name() const override { return "passing"; }
  };
  ShardingOptions hooked = options();
  hooked.comm_hook = std::make_shared<Passing>();
  on_every_layout(hooked, program(),
                  [](ShardedTraining& training) { train(training, 3); });
}

TEST_P(OtherFsdpStreamsTest, ComputesAgainInBackward) {
  for (const bool reentrant : {false, true}) {
    SCOPED_TRACE(reentrant);
    ShardedProgram again = program();
    again.checkpoint = {.reentrant = reentrant, .preserve_rng_state = false};
    on_every_layout(options(), again,
                    [](ShardedTraining& training) { train(training, 3); });
  }
}

// Ranks of some, and all of them in other rows.
TEST_P(OtherFsdpStreamsTest, TrainsUnitsOnMeshesOfTheirOwn) {
  ShardedProgram some = program();
  some.meshes = {{1, {.ranks = {0, 2}}}, {2, {.ranks = {0, 1}}}};
  ShardedProgram other_rows = program();
  other_rows.meshes = {{2, {.ranks = {0, 1, 2, 3}, .num_shards = 2}}};
  for (const ShardedProgram& meshes : {some, other_rows}) {
    on_every_layout(options(), meshes,
                    [](ShardedTraining& training) { train(training, 3); });
  }
}

// Parts of a unit, and all of one: weights that no gradient tells of are read
// in backward too.
TEST_P(OtherFsdpStreamsTest, TrainsAPart) {
  ShardedProgram part = program();
  part.frozen = {1, 2, 3, 4};
  on_every_layout(options(), part,
                  [](ShardedTraining& training) { train(training, 3); });
}

// All ranks leave out the same: its gradients stay as they are.
TEST_P(OtherFsdpStreamsTest, LeavesUnitsOut) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    for (size_t left_out = 1; left_out < ShardedTraining::kNumUnits;
         ++left_out) {
      training.step(1, {left_out});
      training.expect_gradients(1, /*factor=*/1, {left_out});
      for (const at::Tensor& shard : training.root().shards_of(left_out)) {
        EXPECT_FALSE(shard.grad().defined());
      }
      training.update();
      training.zero_grad();
    }
    EXPECT_EQ(training.root().engine_statistics().reduced, 2);
  });
}

TEST_P(OtherFsdpStreamsTest, EvaluatesInBetween) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    for (int s = 0; s < 3; ++s) {
      const at::Tensor loss = training.forward(s);
      {
        const torch::NoGradGuard no_grad;
        training.forward(s);
      }
      loss.backward();
      training.expect_gradients(s);
      training.update();
      training.zero_grad();
    }
  });
}

// First as they are expected, then by their records, of which the second takes
// the place of the first. Gradients of what other streams have read come behind
// the last of a unit's calls.
TEST_P(OtherFsdpStreamsTest, SeveralForwardsArePlannedAsRecorded) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    for (const int num_forwards : {2, 3}) {
      int64_t allocations = 0;
      for (int s = 0; s < 6; ++s) {
        at::Tensor loss = training.forward(s);
        for (int i = 1; i < num_forwards; ++i) {
          loss = loss + training.forward(s);
        }
        loss.backward();
        training.expect_gradients(s, num_forwards);
        training.update();
        training.zero_grad();
        if (s == 3) allocations = training.root().statistics().allocations;
      }
      const ShardingStatistics statistics = training.root().statistics();
      EXPECT_EQ(statistics.allocations, allocations);
      EXPECT_EQ(statistics.whole_bytes, statistics.planned_bytes);
    }
  });
}

TEST_P(OtherFsdpStreamsTest, WritesWholeParameters) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    for (int s = 0; s < 2; ++s) {
      training.root().unshard();
      {
        const torch::NoGradGuard no_grad;
        for (at::Tensor parameter : training.model().parameters()) {
          parameter.mul_(1);
        }
      }
      training.root().reshard(/*writes=*/true);
      training.step(s);
      training.expect_gradients(s);
      training.zero_grad();
    }
  });
}

// One unit, and the others' gathers beside it.
TEST_P(OtherFsdpStreamsTest, WritesAUnitBetweenForwardAndBackward) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    ShardedRoot& root = training.root();
    for (int s = 0; s < 2; ++s) {
      root.unshard(1);
      EXPECT_TRUE(root.await_unit(1));
      {
        const torch::NoGradGuard no_grad;
        for (const auto& segment : root.unit(1).segments) {
          for (const NamedParameter& parameter : segment->parameters()) {
            at::Tensor(parameter.tensor).mul_(1);
          }
        }
      }
      root.reshard(1, /*writes=*/true);
      root.unshard(1);  // its forward waits
      const at::Tensor loss = training.forward(s);
      root.unshard(1);
      loss.backward();
      training.expect_gradients(s);
      training.update();
      training.zero_grad();
    }
  });
}

// Gradients may be dropped; nothing is trained any more. A backward on a
// device's thread may tell of its end a little later.
void expect_closed(ShardedTraining& training) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (training.root().can_continue() &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  simulated::synchronize_all();  // autograd has joined no streams
  training.zero_grad();
  EXPECT_FALSE(training.root().can_continue());
  EXPECT_THROW(training.step(0), c10::DistBackendError);
}

// Ends of iterations are not waited for: what a peer has failed in is told
// where the next forward begins, and closes the group.
TEST_P(OtherFsdpStreamsTest, FailuresOfPeersAreToldInTheNextForward) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    training.recording().answer_statuses_with([](const RankStatus& own) {
      std::vector<RankStatus> by_rank(ShardedTraining::kNumRanks, own);
      if (own.kind == StatusKind::kEnd && own.iteration == 2) {
        by_rank[1].kind = StatusKind::kFailed;
      }
      return by_rank;
    });
    for (int s = 0; s < 2; ++s) {
      training.step(s);
      training.expect_gradients(s);
      training.update();
      training.zero_grad();
    }
    EXPECT_THROW(training.step(2), c10::DistBackendError);
    expect_closed(training);
  });
}

TEST_P(OtherFsdpStreamsTest, ABackwardThatThrowsClosesTheGroup) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    for (int s = 0; s < 2; ++s) {
      training.step(s);
      training.expect_gradients(s);
      training.update();
      training.zero_grad();
    }
    const at::Tensor loss = training.forward(2);
    loss.register_hook([](const at::Tensor&) -> at::Tensor {
      throw std::runtime_error("in backward");
    });
    EXPECT_THROW(loss.backward(), std::runtime_error);
    expect_closed(training);
  });
}

// On a mesh of several rows.
TEST_P(OtherFsdpStreamsTest, RowsAddUpSeveralBackwards) {
  const int num_shards = std::get<0>(GetParam());
  const bool has_rows = num_shards < ShardedTraining::kNumRanks;
  on_every_layout(options(), program(), [&](ShardedTraining& training) {
    for (int s = 0; s < 3; ++s) {
      training.root().set_sums_over_replicas(false);
      training.step(s);
      EXPECT_EQ(training.root().shards()[0].grad().defined(), !has_rows);
      training.step(s);
      training.root().set_sums_over_replicas(true);
      training.step(s);
      training.expect_gradients(s, 3);
      training.update();
      training.zero_grad();
    }
  });
}

// The end of the first backward is refuted where the second begins.
TEST_P(OtherFsdpStreamsTest, WhatRowsHaveAddedUpInVainClosesTheGroup) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    training.recording().answer_statuses_with([](const RankStatus& own) {
      std::vector<RankStatus> by_rank(ShardedTraining::kNumRanks, own);
      if (own.kind == StatusKind::kEnd && own.iteration == 1) {
        by_rank[1].kind = StatusKind::kFailed;
      }
      return by_rank;
    });
    training.root().set_sums_over_replicas(false);
    const at::Tensor first = training.forward(0);
    const at::Tensor second = training.forward(0);
    first.backward();
    EXPECT_THROW(second.backward(), c10::DistBackendError);
    expect_closed(training);
  });
}

TEST_P(OtherFsdpStreamsTest, ReducesWhatBackwardsHaveAddedUp) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    for (int s = 0; s < 3; ++s) {
      training.root().set_synchronizes(false);
      training.step(s);
      training.step(s);
      training.root().set_synchronizes(true);
      training.root().reduce();
      training.expect_gradients(s, 2);
      training.update();
      training.zero_grad();
    }
  });
}

// All ranks are alike, and none has data: gradients are what was added up.
TEST_P(OtherFsdpStreamsTest, StepsWithoutData) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    for (int s = 0; s < 3; ++s) {
      training.root().step_without_data();
      for (const at::Tensor& shard : training.root().shards()) {
        EXPECT_FALSE(shard.grad().defined());
      }
      training.root().set_synchronizes(false);
      training.step(s);
      training.root().set_synchronizes(true);
      training.root().step_without_data();
      training.expect_gradients(s);
      training.update();
      training.zero_grad();
      train(training, 1);
    }
    EXPECT_EQ(training.root().statistics().late_gathers, 0);
  });
}

// Of a parameter that is used twice, one of the two.
TEST_P(OtherFsdpStreamsTest, GradientsAreWrittenIntoTheirSlots) {
  ShardedProgram in_place = program();
  in_place.writes_into_slots = true;
  on_every_layout(options(), in_place, [](ShardedTraining& training) {
    train(training, 3);
    EXPECT_EQ(training.num_in_slots(),
              3 * static_cast<int>(training.model().size()));
  });
}

TEST_P(OtherFsdpStreamsTest, TheHostWaitsForNoDevice) {
  ShardedTraining training(StreamLayout{}, options(), program());
  const auto host_waits = [&](const std::set<size_t>& left_out) {
    int count = 0;
    const simulated::DropCalls watch([&](const simulated::OrderingCall& call) {
      count += call.kind == simulated::OrderingCall::kHostWait ? 1 : 0;
      return false;
    });
    training.step(0, left_out);
    return count;
  };
  for (int s = 0; s < 3; ++s) EXPECT_EQ(host_waits({}), 0);
  // Whether others have used what this rank has not is asked of the device.
  EXPECT_EQ(host_waits({1}), 1);
}

INSTANTIATE_TEST_SUITE_P(, OtherFsdpStreamsTest,
                         ::testing::Values(std::tuple(4, false, 1, false, 0),
                                           std::tuple(4, true, 2, true, 0),
                                           std::tuple(4, false, 0, true, 2),
                                           std::tuple(4, false, 1, false, 2),
                                           std::tuple(2, false, 0, true, 0),
                                           std::tuple(1, false, 1, false, 0)));

using ShardedMemoryTest = simulated::StreamTest;

// A chain of equal units: weights of the one that runs and of the next, and
// gradients of as many as may be summed at once. On a device a sum is not seen
// to end: the memory of the oldest is lent again behind it.
TEST_F(ShardedMemoryTest, IsBoundedByPrefetchAndSums) {
  constexpr size_t kNumUnits = 6;
  constexpr int64_t kBytes = 256;
  const RecordingGroup recording(ShardedTraining::kNumRanks);
  for (const auto& [num_shards, max_reducing] :
       {std::pair(4, size_t{1}), std::pair(4, size_t{2}),
        std::pair(4, size_t{3}), std::pair(2, size_t{1}),
        std::pair(2, size_t{2})}) {
    std::vector<at::Tensor> weights;
    std::vector<UnitSpec> units;
    for (size_t u = 0; u < kNumUnits; ++u) {
      weights.push_back(
          at::ones({kBytes / 4}, simulated::on_device()).requires_grad_());
      units.push_back(
          {.name = c10::str(u), .parameters = {{"w", weights.back()}}});
    }
    ShardedRoot root(units, recording.group(),
                     {.num_shards = num_shards,
                      .prefetch_depth = 1,
                      .max_reducing = max_reducing});
    for (int s = 0; s < 3; ++s) {
      at::Tensor x = at::ones({kBytes / 4}, simulated::on_device());
      x.requires_grad_();
      const at::Tensor loss = root.forward([&] {
        at::Tensor h = x;
        for (size_t u = 0; u < kNumUnits; ++u) {
          h = root.call(u, h,
                        [&](const at::Tensor& in) { return in * weights[u]; });
        }
        return h.sum();
      });
      loss.backward();
    }
    EXPECT_EQ(root.statistics().peak_whole_bytes,
              static_cast<int64_t>(2 + max_reducing) * kBytes);
    EXPECT_EQ(root.statistics().peak_whole_bytes,
              root.statistics().planned_bytes);
    EXPECT_EQ(root.statistics().unplanned, 0);
    EXPECT_THAT(root.explain(), ::testing::HasSubstr("on sim:0; whole units"));
  }
}

using CallsOnStreamsTest = simulated::StreamTest;

// Frozen weights, which no gradient tells of, in a call inside of another one
// of the same unit. Each call reads them on two streams: its inputs' and its
// output's.
TEST_F(CallsOnStreamsTest, AUnitIsReadUntilItsLastCallIsOver) {
  using simulated::default_stream;
  using simulated::make_wait;
  const RecordingGroup recording(ShardedTraining::kNumRanks);
  const at::Tensor frozen = at::ones({4}, simulated::on_device());
  const at::Tensor trained =
      at::ones({4}, simulated::on_device()).requires_grad_();
  const at::Tensor first =
      at::ones({4}, simulated::on_device()).requires_grad_();
  ShardedRoot root({{.name = "", .parameters = {{"trained", trained}}},
                    {.name = "unit", .parameters = {{"frozen", frozen}}},
                    {.name = "first", .parameters = {{"first", first}}}},
                   recording.group(), {.prefetch_depth = 0});
  const std::function<at::Tensor(int)> call = [&](int num_inner) {
    const at::Tensor x = at::ones({4}, simulated::on_device()).requires_grad_();
    const c10::Stream caller = simulated::current_stream_of();
    const c10::Stream begins = simulated::new_stream();
    const c10::Stream ends = simulated::new_stream();
    make_wait(begins, caller);
    const c10::StreamGuard on_begins(begins);
    x.record_stream(begins);
    at::Tensor output = root.call(1, x, [&](const at::Tensor& input) {
      const at::Tensor inner =
          num_inner > 0 ? call(num_inner - 1) : input.detach();
      const at::Tensor hidden = input * frozen;
      make_wait(ends, begins);
      const c10::StreamGuard on_ends(ends);
      for (const at::Tensor& used : {input, inner, hidden}) {
        used.record_stream(ends);
      }
      at::Tensor result = hidden * frozen + inner;
      make_wait(begins, ends);
      return result;
    });
    make_wait(caller, begins);
    output.record_stream(caller);
    return output;
  };
  for (int s = 0; s < 3; ++s) {
    const at::Tensor loss = root.forward([&] {
      return root.call(0, at::ones({4}, simulated::on_device()),
                       [&](const at::Tensor& input) {
                         // Its backward comes last, and its gather gets the
                         // memory then.
                         const at::Tensor scale = root.call(
                             2, input,
                             [&](const at::Tensor& x) { return x * first; });
                         return (call(1) * trained * scale).sum();
                       });
    });
    loss.backward();
  }
}

using FsdpMeshesTest = simulated::StreamTest;

// Whose launches a status counts.
TEST_F(FsdpMeshesTest, MoreGroupsThanAreCountedAreAnError) {
  const ShardedProgram program = {
      .meshes = {{0, {.ranks = {0, 1, 2, 3}, .num_shards = 2}},
                 {1, {.ranks = {0, 2}}},
                 {2, {.ranks = {0, 1}}}}};
  std::string text;
  try {
    ShardedTraining training(all_stream_layouts().front(), {.num_shards = 2},
                             program);
  } catch (const c10::ValueError& error) {
    text = error.what_without_backtrace();
  }
  EXPECT_THAT(text, ::testing::HasSubstr("8 process groups at most"));
}

}  // namespace
}  // namespace brigade
