#include "brigade/benchmarks/support/gradient_shapes.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade::benchmarks {
namespace {

using ::testing::ElementsAre;

TEST(GradientShapesTest, Resnet50HasItsPublishedSize) {
  const Shapes shapes = resnet50_shapes();
  EXPECT_EQ(total_numel(shapes), 25'557'032);
  EXPECT_EQ(shapes.size(), 161);
  EXPECT_THAT(shapes.front(), ElementsAre(64, 3, 7, 7));
  EXPECT_THAT(shapes.back(), ElementsAre(1000));
}

TEST(GradientShapesTest, HalfAsWideResnet50KeepsItsLayers) {
  const Shapes shapes = resnet50_shapes(2);
  EXPECT_EQ(shapes.size(), resnet50_shapes().size());
  EXPECT_THAT(shapes.front(), ElementsAre(32, 3, 7, 7));
  EXPECT_THAT(shapes[shapes.size() - 2], ElementsAre(1000, 1024));
}

TEST(GradientShapesTest, BertBaseHasItsPublishedSize) {
  const Shapes shapes = bert_base_shapes();
  EXPECT_EQ(total_numel(shapes), 109'482'240);
  EXPECT_EQ(shapes.size(), 199);
}

TEST(GradientShapesTest, Gpt2SmallHasItsPublishedSize) {
  const Shapes shapes = gpt2_small_shapes();
  EXPECT_EQ(total_numel(shapes), 124'439'808);
  EXPECT_EQ(shapes.size(), 148);
}

}  // namespace
}  // namespace brigade::benchmarks
