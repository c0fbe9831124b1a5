// Published sizes of models: parameters exactly, other numbers within 5 %.

#include "brigade/simulation/model_shape.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "brigade/planning/planners.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ModelShape shape_of(const std::string& name, int64_t sequence_length = 0) {
  const auto model = named_model(name, sequence_length);
  EXPECT_TRUE(model.ok()) << model.status();
  return *model;
}

void expect_printed(double value, double printed) {
  EXPECT_NEAR(value, printed, 0.05 * printed);
}

double sum(const ModelShape& model, double ModelLayer::*field) {
  double all = 0;
  for (const ModelLayer& layer : model.layers) all += layer.*field;
  return all;
}

TEST(ModelShapeTest, ParametersAreThePublishedOnes) {
  EXPECT_EQ(shape_of("resnet50").elements(), 25'557'032);
  EXPECT_EQ(shape_of("bert-base").elements(), 109'482'240);
  EXPECT_EQ(shape_of("bert-large").elements(), 335'141'888);
  EXPECT_EQ(shape_of("gpt2").elements(), 124'439'808);
  EXPECT_EQ(shape_of("gpt2-xl").elements(), 1'557'611'200);
  expect_printed(shape_of("gpt3").elements(), 175e9);
  EXPECT_EQ(shape_of("llama-7b").elements(), 6'738'415'616);
  EXPECT_EQ(shape_of("llama-70b").elements(), 68'976'648'192);
  EXPECT_EQ(shape_of("llama-405b").elements(), 405'853'388'800);
}

TEST(ModelShapeTest, ResNet50HasTheProductsOfTorchvision) {
  // torchvision prints 4.09 G, multiplications only.
  expect_printed(sum(shape_of("resnet50"), &ModelLayer::forward_flops) / 2,
                 4.09e9);
}

// Narayanan et al. 2021, section 5.1, without recomputing:
// 72 B s l h^2 (1 + s / 6h + V / 12lh) for forward and backward.
TEST(ModelShapeTest, Gpt3HasTheFlopsOfMegatronsFormula) {
  const double s = 2048, l = 96, h = 12288, v = 50257;
  const double formula =
      72 * s * l * h * h * (1 + s / (6 * h) + v / (12 * l * h));
  EXPECT_NEAR(3 * sum(shape_of("gpt3"), &ModelLayer::forward_flops), formula,
              1e-6 * formula);
}

// Published: > 110 GB for 8,192 tokens; 5 GB with full checkpointing. One bf16
// input per block is 10.7 GB, twice as much: 5 GB follow only if every second
// block keeps its input.
TEST(ModelShapeTest, Llama70BKeeps110GBOfActivations) {
  const ModelShape model = shape_of("llama-70b", 8192);
  double blocks = 0;
  double checkpoints = 0;
  for (size_t i = 1; i + 1 < model.layers.size(); ++i) {
    blocks += model.layers[i].activation_bytes;
    checkpoints += model.layers[i].checkpoint_bytes;
  }
  expect_printed(blocks, 110e9);
  EXPECT_DOUBLE_EQ(blocks, 20.5 * 8192 * 8192 * 80);
  expect_printed(checkpoints, 10.7e9);
  expect_printed(checkpoints / 2, 5.4e9);
}

// Korthikanti et al. 2022, equation 1: 34 + 5as/h bytes, GPT-3: 5as/h = 80.
TEST(ModelShapeTest, Gpt3KeepsTheActivationsOfKorthikanti) {
  EXPECT_DOUBLE_EQ(shape_of("gpt3").layers[1].activation_bytes,
                   2048.0 * 12288 * (34 + 80));
}

TEST(ModelShapeTest, NamesAndSequencesAreChecked) {
  EXPECT_THAT(std::string(named_model("llama", 1).status().message()),
              HasSubstr("expected one of resnet50, bert-base"));
  EXPECT_THAT(std::string(named_model("gpt2", 1025).status().message()),
              HasSubstr("sequence_length from 1 to 1024"));
  EXPECT_FALSE(named_model("llama-7b", -1).ok());
}

// ---- Memory.

// A linear layer of 4 x 3 (12 weights, 3 biases) on 16 ranks: one element each;
// the last rank holds padding.
TEST(ModelShapeTest, PaddingIsLessThanOneElementPerRank) {
  const ModelLayer linear = {.tensors = {12, 3}};
  EXPECT_EQ(shard_elements(linear, 16), 1);
  EXPECT_EQ(16 * shard_elements(linear, 16) - linear.elements(), 1);
  EXPECT_EQ(shard_elements(linear, 16, /*by_tensor=*/true), 2);
  EXPECT_EQ(shard_elements({.tensors = {}}, 16), 0);
}

// An 8192 x 8192 matrix in bf16 on 1,024 ranks.
TEST(ModelShapeTest, ZeroSendsMessagesOf128KB) {
  EXPECT_EQ(2 * shard_elements({.tensors = {int64_t{1} << 26}}, 1024),
            128 * 1024);
}

ModelShape equal_layers(int count, double activation, double checkpoint) {
  return {.layers =
              std::vector<ModelLayer>(count, {.activation_bytes = activation,
                                              .checkpoint_bytes = checkpoint})};
}

TEST(ModelShapeTest, ABackwardRecomputesOneLayerAtATime) {
  const ModelShape model = equal_layers(3, 10, 1);
  const auto peak = [&](std::vector<char> checkpointed) {
    return peak_activation_bytes(model, 2, checkpointed);
  };
  EXPECT_EQ(peak({0, 0, 0}), 2 * 30);
  EXPECT_EQ(peak({1, 1, 1}), 2 * (3 + 10));
  EXPECT_EQ(peak({1, 1, 0}), 2 * (2 + 10));
  EXPECT_EQ(peak({0, 0, 1}), 2 * (21 + 10));
}

// All choices are tried.
TEST(ModelShapeTest, CheckpointsFitAndAreFewestForEqualLayers) {
  constexpr int kLayers = 6;
  std::mt19937 random(2);
  const auto draw = [&](int limit) { return double(int(random() % limit)); };
  for (int trial = 0; trial < 400; ++trial) {
    const bool is_equal = trial % 2 == 0;
    ModelShape model = equal_layers(kLayers, 10, 1);
    std::vector<double> recompute_s(kLayers, 1);
    for (int i = 0; i < kLayers && !is_equal; ++i) {
      model.layers[i] = {.activation_bytes = draw(20),
                         .checkpoint_bytes = draw(8)};
      recompute_s[i] = draw(9);
    }
    const double budget = draw(70);
    int fewest = kLayers + 1;
    double least = std::numeric_limits<double>::infinity();
    for (unsigned choice = 0; choice < 1 << kLayers; ++choice) {
      std::vector<char> flags(kLayers);
      for (int i = 0; i < kLayers; ++i) flags[i] = choice >> i & 1;
      const double peak = peak_activation_bytes(model, 1, flags);
      least = std::min(least, peak);
      if (peak <= budget) fewest = std::min(fewest, std::popcount(choice));
    }
    double least_found = 0;
    const auto found =
        checkpoints_to_fit(model, 1, recompute_s, budget, &least_found);
    if (found) {
      EXPECT_LE(peak_activation_bytes(model, 1, *found), budget);
    } else {
      EXPECT_GT(least_found, budget);
    }
    if (!is_equal) continue;
    ASSERT_EQ(found.has_value(), fewest <= kLayers) << budget;
    EXPECT_EQ(found ? std::accumulate(found->begin(), found->end(), 0) : least,
              found ? fewest : least_found);
  }
}

TEST(ModelShapeTest, CheckpointsThatBecomeNeedlessAreDropped) {
  ModelShape model = equal_layers(3, 50, 1);
  model.layers[0].activation_bytes = 10;
  const std::vector<double> recompute_s = {0.1, 10, 20};
  double least = 0;
  EXPECT_THAT(*checkpoints_to_fit(model, 1, recompute_s, 70, &least),
              ElementsAre(0, 1, 0));
}

TEST(ModelShapeTest, UnitsWithTheSlowestAllGathersPerByteStayUnsharded) {
  const std::vector<double> bytes = {10, 10, 0, 10, 5};
  const std::vector<double> gather_s = {1, 3, 9, 1, 4};
  EXPECT_THAT(units_to_keep(bytes, gather_s, 100), ElementsAre(1, 1, 0, 1, 1));
  EXPECT_THAT(units_to_keep(bytes, gather_s, 25), ElementsAre(0, 1, 0, 1, 1));
  EXPECT_THAT(units_to_keep(bytes, gather_s, 5), ElementsAre(0, 0, 0, 0, 1));
  EXPECT_THAT(units_to_keep(bytes, gather_s, -1), ElementsAre(0, 0, 0, 0, 0));
}

}  // namespace
}  // namespace brigade
