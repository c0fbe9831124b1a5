// Published sizes of models: parameters exactly, other numbers within 5 %.

#include "brigade/simulation/model_shape.h"

#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::HasSubstr;

ModelShape shape_of(const std::string& name, int64_t sequence_length = 0) {
  const auto model = named_model(name, sequence_length);
  EXPECT_TRUE(model.ok() && check_model(*model).ok()) << model.status();
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

TEST(ModelShapeTest, BadShapesAreErrors) {
  const ModelLayer good = {.name = "a", .tensors = {3}};
  EXPECT_TRUE(check_model({.layers = {good, {.name = "relu"}}}).ok());
  std::vector<ModelLayer> bad(5, good);
  bad[0].tensors = {};
  bad[1].tensors = {0};
  bad[2].tensors = {int64_t{1} << 50, 1};
  bad[3].forward_flops = std::numeric_limits<double>::quiet_NaN();
  bad[4].backward_s = -1;
  for (const ModelLayer& layer : bad) {
    EXPECT_FALSE(check_model({.layers = {layer}}).ok());
  }
  EXPECT_FALSE(check_model({}).ok());
}

}  // namespace
}  // namespace brigade
