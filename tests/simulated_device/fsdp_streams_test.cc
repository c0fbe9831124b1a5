// Sharded training on every layout of streams: all-gathers, computation,
// reductions and delivery are ordered, and memory is reused only afterwards.

#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "brigade/checkpoint/checkpoint.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/fsdp/sharded_model.h"
#include "brigade/fsdp/sharded_tensor.h"
#include "brigade/tests/simulated_device/streamed_training.h"
#include "brigade/tests/support/simulated_device/ordering_calls.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace fsdp_streams_test {

using ::testing::HasSubstr;
using testing::on_every_layout;
using testing::ShardedProgram;
using testing::ShardedTraining;
using testing::StreamLayout;

constexpr size_t kNumUnits = ShardedTraining::kNumUnits;

// num_shards, unsharded from forward to backward, prefetch_depth,
// calls_on_own_stream, reshard_after_forward as a number (0: none).
class FsdpStreamsTest : public simulated::StreamTest,
                        public ::testing::WithParamInterface<
                            std::tuple<int, bool, int, bool, int>> {
 protected:
  static FullyShardOptions options() {
    const int reshard_to = std::get<4>(GetParam());
    FullyShardOptions options = {
        .num_shards = std::get<0>(GetParam()),
        .reshard_after_forward = !std::get<1>(GetParam()),
        .prefetch_depth = static_cast<size_t>(std::get<2>(GetParam()))};
    if (reshard_to > 0) options.reshard_after_forward = reshard_to;
    return options;
  }
  static ShardedProgram program() {
    return {.calls_on_own_stream = std::get<3>(GetParam())};
  }
};

void train(ShardedTraining& training, int num_steps) {
  for (int s = 0; s < num_steps; ++s) {
    training.step(s);
    training.expect_gradients(s);
    training.update();
  }
}

TEST_P(FsdpStreamsTest, Trains) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    train(training, 2);
    const ShardedModelStatistics learned = training.sharded().statistics();
    train(training, 2);
    const ShardedModelStatistics found = training.sharded().statistics();
    EXPECT_EQ(found.learned_segments, 2);
    EXPECT_EQ(found.rounds, learned.rounds);
  });
}

INSTANTIATE_TEST_SUITE_P(, FsdpStreamsTest,
                         ::testing::Values(std::tuple(4, false, 0, false, 0),
                                           std::tuple(4, true, 1, true, 0),
                                           std::tuple(4, false, 2, true, 0),
                                           std::tuple(2, true, 0, true, 0),
                                           std::tuple(2, false, 1, false, 0),
                                           std::tuple(1, false, 0, true, 0),
                                           std::tuple(1, true, 2, true, 0)));
INSTANTIATE_TEST_SUITE_P(ReshardToSome, FsdpStreamsTest,
                         ::testing::Values(std::tuple(4, false, 0, true, 2),
                                           std::tuple(4, false, 1, false, 2)));

using OtherFsdpStreamsTest = FsdpStreamsTest;

void expect_training(const FullyShardOptions& options,
                     const ShardedProgram& program) {
  on_every_layout(options, program,
                  [](ShardedTraining& training) { train(training, 3); });
}

TEST_P(OtherFsdpStreamsTest, TrainsInLowerPrecision) {
  for (const at::ScalarType reduce : {at::kFloat, at::kBFloat16}) {
    FullyShardOptions mixed = options();
    mixed.param_dtype = at::kBFloat16;
    mixed.reduce_dtype = reduce;
    expect_training(mixed, program());
  }
}

void sums_over_replicas(ShardedTraining& training, bool value) {
  for (size_t unit = 0; unit < kNumUnits; ++unit) {
    training.sharded().settings(unit).sums_over_replicas = value;
  }
}

// The first two backwards of a step reduce within shard groups only.
void train_with_partial_sums(ShardedTraining& training) {
  for (int s = 0; s < 2; ++s) {
    sums_over_replicas(training, false);
    training.step(s);
    training.step(s);
    sums_over_replicas(training, true);
    training.step(s);
    training.expect_gradients(s, 3);
    training.update();
  }
}

TEST_P(OtherFsdpStreamsTest, PartialSumsAddUpOverBackwards) {
  on_every_layout(options(), program(), train_with_partial_sums);
}

TEST_P(OtherFsdpStreamsTest, ReducesCompressedGradients) {
  FullyShardOptions compressed = options();
  compressed.comm_hook = compression_hook(at::kBFloat16);
  on_every_layout(compressed, program(), [](ShardedTraining& training) {
    train(training, 3);
    train_with_partial_sums(training);
  });
}

TEST_P(OtherFsdpStreamsTest, ReducesInRankOrder) {
  for (const at::ScalarType reduce : {at::kFloat, at::kBFloat16}) {
    FullyShardOptions in_order = options();
    in_order.reproducible = true;
    in_order.reduce_dtype = reduce;
    on_every_layout(in_order, program(), [](ShardedTraining& training) {
      train(training, 3);
      train_with_partial_sums(training);
    });
  }
}

TEST_P(OtherFsdpStreamsTest, RecomputesInBackward) {
  ShardedProgram checkpointed = program();
  checkpointed.is_checkpointed = true;
  expect_training(options(), checkpointed);
}

// Meshes of some ranks, and one of all ranks with other shard groups.
TEST_P(OtherFsdpStreamsTest, TrainsUnitsWithTheirOwnMesh) {
  ShardedProgram some = program();
  some.meshes = {{1, {.ranks = {0, 2}}}, {2, {.ranks = {0, 1}}}};
  ShardedProgram regrouped = program();
  regrouped.meshes = {{2, {.ranks = {0, 1, 2, 3}, .num_shards = 2}}};
  for (const ShardedProgram& meshes : {some, regrouped}) {
    expect_training(options(), meshes);
  }
}

// Freezes one unit and half of two others. Backward reads frozen weights
// without a gradient hook on them.
TEST_P(OtherFsdpStreamsTest, TrainsWithFrozenParameters) {
  ShardedProgram frozen = program();
  frozen.frozen = {1, 2, 3, 4};
  expect_training(options(), frozen);
}

TEST_P(OtherFsdpStreamsTest, GradientsOfSkippedUnitsStayUndefined) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    for (const size_t left_out : {1, 1, 2, 1}) {
      training.step(1, {left_out});
      training.expect_gradients(1, /*factor=*/1, {left_out});
      EXPECT_FALSE(training.parameter(left_out, 0).grad().defined());
      training.update();
    }
  });
}

// Expects `factor` times the gradients of a step after each `step`.
template <typename Step>
void expect_steps(const FullyShardOptions& options,
                  const ShardedProgram& program, double factor,
                  const Step& step) {
  on_every_layout(options, program, [&](ShardedTraining& training) {
    for (int s = 0; s < 3; ++s) {
      step(training, s);
      training.expect_gradients(s, factor);
      training.update();
    }
  });
}

TEST_P(OtherFsdpStreamsTest, EvaluatesBetweenForwardAndBackward) {
  expect_steps(options(), program(), 1, [](ShardedTraining& training, int s) {
    const at::Tensor loss = training.forward(s);
    {
      const torch::NoGradGuard no_grad;
      training.forward(s);
    }
    loss.backward();
  });
}

TEST_P(OtherFsdpStreamsTest, ReducesSeveralForwardsInOneBackward) {
  expect_steps(options(), program(), 3, [](ShardedTraining& training, int s) {
    (training.forward(s) + training.forward(s) + training.forward(s))
        .backward();
  });
}

TEST_P(OtherFsdpStreamsTest, ReducesTwoBackwardsOfOneForward) {
  expect_steps(options(), program(), 3, [](ShardedTraining& training, int s) {
    const at::Tensor output = training.forward(s);
    output.backward({}, /*retain_graph=*/true);
    (2 * output).backward();
  });
}

TEST_P(OtherFsdpStreamsTest, WritesUnshardedParameters) {
  expect_steps(options(), program(), 1, [](ShardedTraining& training, int s) {
    const std::vector<size_t> written = {0, 1};
    const std::vector<size_t> read = {2};
    training.sharded().unshard(written, /*may_write=*/true);
    {
      const torch::NoGradGuard no_grad;
      for (const size_t unit : written) {
        at::Tensor(training.parameter(unit, 0)).mul_(1);
      }
    }
    training.sharded().reshard(written);
    const at::Tensor loss = training.forward(s);
    training.sharded().unshard(read);
    training.sharded().reshard(read);
    loss.backward();
  });
}

TEST_P(OtherFsdpStreamsTest, ReducesAccumulatedGradients) {
  expect_steps(options(), program(), 2, [](ShardedTraining& training, int s) {
    training.sharded().set_requires_gradient_sync(false);
    training.step(s);
    training.step(s);
    training.sharded().set_requires_gradient_sync(true);
    training.sharded().reduce();
  });
}

TEST_P(OtherFsdpStreamsTest, ClipsGradients) {
  expect_steps(options(), program(), 1, [](ShardedTraining& training, int s) {
    training.step(s);
    const double largest = training.sharded().clip_grad_norm(
        1e9, std::numeric_limits<double>::infinity());
    EXPECT_GT(largest, 0);
    EXPECT_GE(training.sharded().clip_grad_norm(1e9), largest);
  });
}

TEST_P(OtherFsdpStreamsTest, GradientsAreWrittenIntoTheirSlots) {
  ShardedProgram in_place = program();
  in_place.writes_into_slots = true;
  on_every_layout(options(), in_place, [](ShardedTraining& training) {
    train(training, 3);
    EXPECT_EQ(training.num_in_slots(), 3 * 2 * static_cast<int>(kNumUnits));
  });
}

INSTANTIATE_TEST_SUITE_P(, OtherFsdpStreamsTest,
                         ::testing::Values(std::tuple(4, false, 1, false, 0),
                                           std::tuple(4, false, 0, true, 2),
                                           std::tuple(2, true, 2, true, 0),
                                           std::tuple(1, false, 1, false, 0)));

// ---- Settings of units.

struct Setting {
  const char* name;
  void (*apply)(UnitSettings&);
  std::vector<size_t> units;
};

std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << setting.name;
}

const Setting kSettings[] = {
    {"OneUnitStaysUnshardedForBackward",
     [](UnitSettings& s) { s.reshard_after_forward = false; },
     {1}},
    {"UnitsStayUnshardedAfterBackward",
     [](UnitSettings& s) { s.reshard_after_backward = false; },
     {0, 1, 2}},
    {"UnitsKeepTheirStorage",
     [](UnitSettings& s) { s.keeps_storage = true; },
     {0, 1, 2}},
    {"OneUnitPrefetchesMore",
     [](UnitSettings& s) {
       s.forward_prefetch_depth = s.backward_prefetch_depth = 2;
     },
     {0}},
};

class UnitSettingsStreamsTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<Setting, int>> {};

TEST_P(UnitSettingsStreamsTest, Trains) {
  const auto& [setting, num_shards] = GetParam();
  on_every_layout({.num_shards = num_shards, .prefetch_depth = 1},
                  {.calls_on_own_stream = true},
                  [&](ShardedTraining& training) {
                    for (const size_t unit : setting.units) {
                      setting.apply(training.sharded().settings(unit));
                    }
                    train(training, 4);
                  });
}

INSTANTIATE_TEST_SUITE_P(, UnitSettingsStreamsTest,
                         ::testing::Combine(::testing::ValuesIn(kSettings),
                                            ::testing::Values(4, 2)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  std::to_string(std::get<1>(info.param));
                         });

class OneUnitStreamsTest : public simulated::StreamTest,
                           public ::testing::WithParamInterface<int> {
 protected:
  static FullyShardOptions options() { return {.num_shards = GetParam()}; }
};

TEST_P(OneUnitStreamsTest, SpansSegments) {
  expect_training(options(), {.spanning = {1}});
}

TEST_P(OneUnitStreamsTest, AccumulatesWhileOthersReduce) {
  expect_steps(options(), {}, 2, [](ShardedTraining& training, int s) {
    training.sharded().settings(1).synchronizes = false;
    training.step(s);
    training.sharded().settings(1).synchronizes = true;
    training.step(s);
  });
}

TEST_P(OneUnitStreamsTest, IsFrozenAndThawed) {
  on_every_layout(options(), {}, [](ShardedTraining& training) {
    for (int s = 0; s < 4; ++s) {
      const bool is_frozen = s % 2 == 1;
      for (const size_t i : {0, 1}) {
        training.parameter(1, i).set_requires_grad(!is_frozen);
      }
      training.step(s);
      training.expect_gradients(
          s, 1, is_frozen ? std::set<size_t>{1} : std::set<size_t>{});
      training.update();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, OneUnitStreamsTest, ::testing::Values(4, 2));

// ---- Statuses, on one layout.

int count_host_waits(const std::function<void()>& run) {
  int count = 0;
  const simulated::DropCalls watch([&](const simulated::OrderingCall& call) {
    count += call.kind == simulated::OrderingCall::kHostWait ? 1 : 0;
    return false;
  });
  run();
  return count;
}

// Awaits the failed status, which a device thread sends after backward throws.
void await_own_failure(ShardedTraining& training) {
  const auto has_failed = [&] {
    return training.recording().statuses().back().find("failed") !=
           std::string::npos;
  };
  while (!has_failed()) std::this_thread::yield();
  training.sharded().statistics();  // waits for that thread's lock
  simulated::synchronize_all();     // a failed backward joins no streams
}

void expect_closed(ShardedTraining& training) {
  simulated::synchronize_all();
  EXPECT_FALSE(training.sharded().can_continue());
  EXPECT_THAT([&] { training.step(0); },
              ::testing::ThrowsMessage<c10::Error>(
                  HasSubstr("this model can't continue")));
}

// The parameter is max_unconfirmed_iterations.
class ShardedRunAheadTest : public simulated::StreamTest,
                            public ::testing::WithParamInterface<int> {
 protected:
  // Records the schedules.
  ShardedRunAheadTest() { train(training_, 2); }

  // Whether a status ends the forward or backward of the third step.
  static bool ends(const RankStatus& own, SegmentKind segment) {
    return own.kind == StatusKind::kEnd &&
           own.iteration == iteration_of(segment, 3);
  }
  // Changes rank 1's status at the end of the next step's forward or backward.
  void answer(SegmentKind segment,
              const std::function<void(RankStatus&)>& change) {
    training_.recording().answer_statuses_with([=](const RankStatus& own) {
      std::vector<RankStatus> by_rank(testing::kWorldSize, own);
      if (ends(own, segment)) {
        change(by_rank[1]);
      }
      return by_rank;
    });
  }
  // Returns the number of steps before one that throws; -1 if none does.
  int steps_before_error() {
    for (int s = 0; s < 8; ++s) {
      try {
        train(training_, 1);
      } catch (const PeerError&) {
        return s;
      }
    }
    return -1;
  }

  ShardedTraining training_{StreamLayout{},
                            {.max_unconfirmed_iterations = GetParam()},
                            {.timeout = std::chrono::seconds(2)}};
};

TEST_P(ShardedRunAheadTest, TheHostRunsAheadOfLatePeersByTheLimit) {
  training_.recording().hold_statuses();
  EXPECT_EQ(steps_before_error(), GetParam() == 0 ? 0 : GetParam() + 1);
  expect_closed(training_);
}

TEST_P(ShardedRunAheadTest, TheHostDoesNotWaitForTheDevice) {
  EXPECT_EQ(count_host_waits([&] { training_.step(2); }), 0);
}

TEST_P(ShardedRunAheadTest, APeersFailureIsReportedWithinTheLimit) {
  answer(SegmentKind::kBackward, [](RankStatus& status) {
    status.kind = StatusKind::kFailed;
    status.text = status_text("no memory");
  });
  EXPECT_EQ(steps_before_error(), GetParam() == 0 ? 0 : GetParam() + 1);
  // Without outstanding statuses all ranks fail in the same step.
  EXPECT_EQ(training_.sharded().can_continue(), GetParam() == 0);
  if (GetParam() > 0) expect_closed(training_);
}

TEST_P(ShardedRunAheadTest, EvaluationAwaitsStatuses) {
  answer(SegmentKind::kBackward,
         [](RankStatus& status) { status.kind = StatusKind::kFailed; });
  const auto step_and_evaluate = [&] {
    train(training_, 1);
    const torch::NoGradGuard no_grad;
    training_.forward(0);
  };
  EXPECT_THROW(step_and_evaluate(), PeerError);
}

TEST_P(ShardedRunAheadTest, DestructionReportsALateFailure) {
  if (GetParam() == 0) GTEST_SKIP() << "the step itself fails";
  std::optional<ShardedTraining> training;
  training.emplace(StreamLayout{},
                   FullyShardOptions{.max_unconfirmed_iterations = GetParam()});
  train(*training, 2);
  training->recording().answer_statuses_with([](const RankStatus& own) {
    std::vector<RankStatus> by_rank(testing::kWorldSize, own);
    if (ends(own, SegmentKind::kBackward)) {
      by_rank[1].kind = StatusKind::kFailed;
      by_rank[1].text = status_text("no memory");
    }
    return by_rank;
  });
  training->step(0);
  ::testing::internal::CaptureStderr();
  training.reset();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::HasSubstr("no memory"));
}

TEST_P(ShardedRunAheadTest, CallsBetweenStepsAwaitStatuses) {
  const std::string path = c10::str(::testing::TempDir(), "/await_statuses.",
                                    getpid(), ".safetensors");
  const std::vector<std::function<void(ShardedTraining&)>> calls = {
      [](ShardedTraining& training) { training.sharded().barrier(); },
      [](ShardedTraining& training) { gather_whole(training.parameter(1, 0)); },
      [&](ShardedTraining& training) {
        save_checkpoint(path, checkpoint_model(training.sharded()));
      },
  };
  for (const auto& call : calls) {
    ShardedTraining training{StreamLayout{},
                             {.max_unconfirmed_iterations = GetParam()},
                             {.timeout = std::chrono::seconds(2)}};
    train(training, 2);
    training.recording().answer_statuses_with([](const RankStatus& own) {
      std::vector<RankStatus> by_rank(testing::kWorldSize, own);
      if (ends(own, SegmentKind::kBackward)) {
        by_rank[1].kind = StatusKind::kFailed;
      }
      return by_rank;
    });
    const auto step_and_call = [&] {
      training.step(0);
      call(training);
    };
    EXPECT_THROW(step_and_call(), PeerError);
    if (GetParam() > 0) {
      EXPECT_THROW(call(training), c10::Error);
    }
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

// The peer needs a unit that is not in the schedule, and waits for a round.
TEST_P(ShardedRunAheadTest, APeersUnscheduledNeedIsReportedWithinTheLimit) {
  if (GetParam() == 0) GTEST_SKIP() << "ranks gather it";
  answer(SegmentKind::kForward, [](RankStatus& status) {
    status.unit = 1;
    status.proposal = 0;
  });
  EXPECT_EQ(steps_before_error(), GetParam() + 1);
  expect_closed(training_);
}

// This rank needs a unit once more after its peers have continued.
TEST_P(ShardedRunAheadTest, AnUnscheduledNeedOfThisRankIsAnError) {
  if (GetParam() == 0) GTEST_SKIP() << "ranks gather it";
  training_.recording().answer_statuses_with([](const RankStatus& own) {
    std::vector<RankStatus> by_rank(testing::kWorldSize, own);
    if (own.kind == StatusKind::kEnd && own.unit >= 0) {
      by_rank[1].unit = -1;
      by_rank[1].proposal = 2;  // has continued
    }
    return by_rank;
  });
  EXPECT_THAT(
      [&] {
        training_.forward_through({1, 2, 1, 2, 1}, 0);
      },
      ::testing::ThrowsMessage<PeerError>(
          HasSubstr("in another order than recorded")));
  expect_closed(training_);
}

// The peers have continued if max_unconfirmed_iterations allows it.
TEST_P(ShardedRunAheadTest, AFailureOfThisRankClosesTheGroup) {
  training_.recording().answer_statuses_with([&](const RankStatus& own) {
    std::vector<RankStatus> by_rank(testing::kWorldSize, own);
    if (own.kind == StatusKind::kFailed && GetParam() > 0) {
      by_rank[1].kind = StatusKind::kEnd;
      by_rank[1].proposal = 2;  // has continued
    }
    return by_rank;
  });
  const at::Tensor loss = training_.forward(2);
  loss.register_hook([](const at::Tensor&) -> at::Tensor {
    throw std::runtime_error("in backward");
  });
  EXPECT_THROW(loss.backward(), std::runtime_error);
  await_own_failure(training_);
  if (GetParam() > 0) {
    expect_closed(training_);
  } else {
    EXPECT_TRUE(training_.sharded().can_continue());
    train(training_, 2);
  }
}

INSTANTIATE_TEST_SUITE_P(, ShardedRunAheadTest, ::testing::Values(0, 1, 3));

// ---- Memory.

using ShardedMemoryTest = simulated::StreamTest;

// Buffers hold the weights of the unit in use and the next one, and gradients
// of max_reducing units. The host does not see a reduction end on a device, so
// the next unit takes the oldest buffer, in stream order.
TEST_F(ShardedMemoryTest, IsBoundedByPrefetchAndMaxReducing) {
  constexpr size_t kNumEqualUnits = 6;
  constexpr int64_t kBytes = 256;
  const RecordingGroup recording(testing::kWorldSize);
  for (const size_t max_reducing : {1, 2, 3}) {
    std::vector<at::Tensor> weights;
    std::vector<UnitRequest> units;
    for (size_t u = 0; u < kNumEqualUnits; ++u) {
      weights.push_back(
          at::ones({kBytes / 4}, simulated::on_device()).requires_grad_());
      units.push_back(
          {.name = c10::str(u), .parameters = {{"w", weights.back()}}});
    }
    SegmentedModel model(make_sharded_units(units, recording.group(), {}),
                         recording.group());
    model.set_max_reducing(max_reducing);
    for (int s = 0; s < 4; ++s) {
      at::Tensor x = at::ones({kBytes / 4}, simulated::on_device());
      x.requires_grad_();
      model
          .forward([&] {
            at::Tensor h = x;
            for (const at::Tensor& weight : weights) h = h * weight;
            return h.sum();
          })
          .backward();
    }
    EXPECT_EQ(model.statistics().peak_buffer_bytes,
              static_cast<int64_t>(2 + max_reducing) * kBytes);
  }
}

// A side stream reads frozen weights, so no gradient hook runs on that stream.
TEST_F(ShardedMemoryTest, IsReusedAfterAllStreamsThatReadIt) {
  using simulated::default_stream;
  using simulated::make_wait;
  using simulated::on_device;
  const RecordingGroup recording(/*world_size=*/2);
  const c10::Stream side = simulated::new_stream();
  std::vector<UnitRequest> units;
  for (int u = 0; u < 5; ++u) {
    units.push_back(
        {.name = std::to_string(u),
         .parameters = {
             {"frozen", at::ones({8}, on_device())},
             {"trained", at::ones({8}, on_device()).requires_grad_()}}});
  }
  SegmentedModel model(make_sharded_units(units, recording.group(), {}),
                       recording.group(), {});
  const at::Tensor own = at::ones({8}, on_device()).requires_grad_();
  for (int step = 0; step < 3; ++step) {
    model
        .forward([&] {
          at::Tensor h = at::ones({8}, on_device()).requires_grad_();
          for (const UnitRequest& unit : units) {
            make_wait(side, default_stream());
            at::Tensor product;
            {
              const c10::StreamGuard on_side(side);
              own.record_stream(side);
              product = own * unit.parameters[0].tensor;
            }
            make_wait(default_stream(), side);
            product.record_stream(default_stream());
            h = h + product + unit.parameters[1].tensor;
          }
          return h;
        })
        .sum()
        .backward();
    at::Tensor(own).mutable_grad().reset();
  }
}

}  // namespace fsdp_streams_test
}  // namespace brigade
