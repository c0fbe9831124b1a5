// What a user sets of units and does between passes, on every layout of
// streams.

#include <torch/torch.h>

#include <cstddef>
#include <functional>
#include <limits>
#include <ostream>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/fsdp/fully_shard.h"
#include "brigade/tests/simulated_device/sharded_training.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace fsdp_settings_streams_test {

using testing::on_every_layout;
using testing::ShardedProgram;
using testing::ShardedTraining;

constexpr int kNumSteps = 4;

struct Setting {
  std::string name;
  std::function<void(ShardedRoot&)> apply;
};

std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << setting.name;
}

void of_all_units(ShardedRoot& root,
                  const std::function<void(UnitSettings&)>& set) {
  for (size_t unit = 0; unit < ShardedTraining::kNumUnits; ++unit) {
    set(root.settings(unit));
  }
}

const Setting kSettings[] = {
    {"OneUnitIsKeptForBackward",
     [](ShardedRoot& root) {
       root.settings(1).reshards_after_forward = false;
     }},
    {"UnitsAreKeptBehindBackward",
     [](ShardedRoot& root) {
       of_all_units(root,
                    [](UnitSettings& s) { s.reshards_after_backward = false; });
     }},
    {"UnitsKeepTheirStorage",
     [](ShardedRoot& root) {
       of_all_units(root, [](UnitSettings& s) { s.keeps_storage = true; });
     }},
    {"GathersGoByLists",
     [](ShardedRoot& root) {
       root.settings(0).forward_prefetch = {2, 1};
       root.settings(0).backward_prefetch = {1, 2};
       root.settings(1).forward_prefetch = {2};
       root.settings(2).backward_prefetch = {1};
     }},
};

void end_step(ShardedTraining& training) {
  training.update();
  training.zero_grad();
}

// Setting x shards x prefetch depth.
class UnitSettingsStreamsTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<Setting, int, int>> {};

TEST_P(UnitSettingsStreamsTest, Trains) {
  const auto& [setting, num_shards, depth] = GetParam();
  const ShardingOptions options = {
      .num_shards = num_shards, .prefetch_depth = static_cast<size_t>(depth)};
  for (const bool own_stream : {false, true}) {
    on_every_layout(options, {.calls_on_own_stream = own_stream},
                    [&](ShardedTraining& training) {
                      setting.apply(training.root());
                      for (int s = 0; s < kNumSteps; ++s) {
                        training.step(s);
                        training.expect_gradients(s);
                        if (s % 2 == 1) end_step(training);
                        training.zero_grad();
                      }
                    });
  }
}

std::string name_of_mode(
    const ::testing::TestParamInfo<UnitSettingsStreamsTest::ParamType>& info) {
  return std::get<0>(info.param).name;
}

INSTANTIATE_TEST_SUITE_P(In4Depth0, UnitSettingsStreamsTest,
                         ::testing::Combine(::testing::ValuesIn(kSettings),
                                            ::testing::Values(4),
                                            ::testing::Values(0)),
                         name_of_mode);
INSTANTIATE_TEST_SUITE_P(In2Depth2, UnitSettingsStreamsTest,
                         ::testing::Combine(::testing::ValuesIn(kSettings),
                                            ::testing::Values(2),
                                            ::testing::Values(2)),
                         name_of_mode);

// Number of shards.
class BetweenPassesStreamsTest : public simulated::StreamTest,
                                 public ::testing::WithParamInterface<int> {
 protected:
  template <typename Body>
  static void with_training(const ShardedProgram& program, const Body& body) {
    on_every_layout({.num_shards = GetParam()}, program, body);
  }
};

TEST_P(BetweenPassesStreamsTest, AUnitSpansPasses) {
  with_training({.spanning = {1}}, [](ShardedTraining& training) {
    for (int s = 0; s < kNumSteps; ++s) {
      training.step(s);
      training.expect_gradients(s);
      end_step(training);
    }
  });
}

TEST_P(BetweenPassesStreamsTest, OneUnitAddsUpWhatOthersReduce) {
  with_training({}, [](ShardedTraining& training) {
    for (int s = 0; s < kNumSteps; ++s) {
      training.root().settings(1).synchronizes = false;
      training.step(s);
      training.root().settings(1).synchronizes = true;
      training.step(s);
      training.expect_gradients(s, 2);
      end_step(training);
    }
  });
}

TEST_P(BetweenPassesStreamsTest, OneUnitAddsUpInItsRow) {
  const bool has_rows = GetParam() < ShardedTraining::kNumRanks;
  with_training({}, [&](ShardedTraining& training) {
    for (int s = 0; s < kNumSteps; ++s) {
      training.root().settings(1).sums_over_replicas = false;
      training.step(s);
      EXPECT_EQ(training.root().shards_of(1)[0].grad().defined(), !has_rows);
      training.root().settings(1).sums_over_replicas = true;
      training.expect_gradients(s, 1, {1});
      training.step(s);
      training.expect_gradients(s, 2, {1});
      end_step(training);
    }
  });
}

TEST_P(BetweenPassesStreamsTest, GradientsAreClipped) {
  with_training({}, [](ShardedTraining& training) {
    for (int s = 0; s < kNumSteps; ++s) {
      training.step(s);
      const double largest = training.root().clip_grad_norm(
          1e9, std::numeric_limits<double>::infinity());
      EXPECT_GT(largest, 0);
      EXPECT_GE(training.root().clip_grad_norm(1e9), largest);
      training.expect_gradients(s);
      end_step(training);
    }
  });
}

TEST_P(BetweenPassesStreamsTest, AUnitIsFrozenAndThawed) {
  with_training({}, [](ShardedTraining& training) {
    for (int s = 0; s < kNumSteps; ++s) {
      const bool is_frozen = s % 2 == 1;
      for (const size_t i : {2, 3}) {
        training.model().parameters()[i].set_requires_grad(!is_frozen);
      }
      training.step(s);
      training.expect_gradients(
          s, 1, is_frozen ? std::set<size_t>{1} : std::set<size_t>{});
      end_step(training);
    }
  });
}

TEST_P(BetweenPassesStreamsTest, TwoLossesOfOneForward) {
  with_training({}, [](ShardedTraining& training) {
    for (int s = 0; s < kNumSteps; ++s) {
      const at::Tensor output = training.forward(s);
      output.backward({}, /*retain_graph=*/true);
      (2 * output).backward();
      training.expect_gradients(s, 3);
      end_step(training);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, BetweenPassesStreamsTest, ::testing::Values(4, 2));

struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(int64_t numel) {
    weight =
        register_parameter("weight", at::ones({numel}, simulated::on_device()));
  }
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight;
};
TORCH_MODULE(Scale);

// Its backward reads the input only.
struct ShiftImpl : torch::nn::Module {
  explicit ShiftImpl(int64_t numel, at::ScalarType dtype = at::kFloat) {
    weight = register_parameter("weight",
                                at::ones({numel}, simulated::on_device(dtype)));
    bias =
        register_parameter("bias", at::ones({numel}, simulated::on_device()));
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + weight.to(at::kFloat) + 2 * bias;
  }
  at::Tensor weight;
  at::Tensor bias;
};
TORCH_MODULE(Shift);

using FrontStreamsTest = simulated::StreamTest;

// Of four ranks that are alike: the average is this one's.
template <typename Model>
void expect_shift_gradients(Model& model, size_t unit) {
  simulated::synchronize_all();
  const auto shards = model.root().shards_of(unit);
  EXPECT_TRUE(at::all(shards[0].grad().cpu().eq(1)).template item<bool>());
  EXPECT_TRUE(at::all(shards[1].grad().cpu().eq(2)).template item<bool>());
}

TEST_F(FrontStreamsTest, ChildrenOfASequentialAreUnits) {
  const RecordingGroup recording(4);
  FullySharded model(torch::nn::Sequential(Shift(8), Scale(8), Scale(8)),
                     recording.group());
  for (int s = 0; s < 3; ++s) {
    const at::Tensor x = at::ones({8}, simulated::on_device());
    model(x).sum().backward();
    expect_shift_gradients(model, 0);
    for (const at::Tensor& shard : model.root().shards()) {
      shard.mutable_grad().reset();
    }
  }
}

TEST_F(FrontStreamsTest, AUnitOfTwoDtypesWhoseBackwardReadsNoWeights) {
  const RecordingGroup recording(4);
  FullySharded model(
      torch::nn::Sequential(Scale(8), Shift(8, at::kBFloat16), Scale(8)),
      recording.group());
  model.root().settings(1).gathers_in_backward = false;
  for (int s = 0; s < 3; ++s) {
    const at::Tensor x = at::ones({8}, simulated::on_device());
    model(x).sum().backward();
    expect_shift_gradients(model, 1);
    for (const at::Tensor& shard : model.root().shards()) {
      shard.mutable_grad().reset();
    }
  }
}

}  // namespace fsdp_settings_streams_test
}  // namespace brigade
