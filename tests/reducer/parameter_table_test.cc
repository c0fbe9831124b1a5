#include "brigade/reducer/parameter_table.h"

#include <torch/torch.h>

#include <string>
#include <vector>

#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/gradient_errors.h"
#include "brigade/tests/reducer/failing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::text_of;

ParameterTable table_of(int n, bool named) {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  for (int i = 0; i < n; ++i) {
    tensors.push_back(at::ones({i, 2}).requires_grad_());
    names.push_back(std::string(1, static_cast<char>('a' + i)));
  }
  return {{tensors}, named ? names : std::vector<std::string>{}, {}};
}

TEST(ParameterTableTest, NamesParameters) {
  EXPECT_EQ(table_of(2, true).name_of(1), "parameter 1 ('b')");
  EXPECT_EQ(table_of(2, false).name_of(1), "parameter 1");
}

TEST(ParameterTableTest, ListsFiveNamesAndACount) {
  const ParameterTable table = table_of(8, true);
  EXPECT_EQ(table.name_of(std::vector<size_t>{3}), "parameter 3 ('d')");
  EXPECT_EQ(table.name_of(std::vector<size_t>{0, 1, 2, 3, 4, 5, 6}),
            "parameters 0 ('a'), 1 ('b'), 2 ('c'), 3 ('d'), 4 ('e') and 2 "
            "more");
}

TEST(ParameterTableTest, DescribesParametersForComparison) {
  const ParameterTable table({{at::ones({2, 3}).t().requires_grad_(),
                               at::ones({1}, at::kHalf).requires_grad_()}},
                             {"w", "b"}, {true, false});
  EXPECT_THAT(table.describe_all(),
              ElementsAre("0 ('w'): float32, shape [3, 2], strides [1, 3], on "
                          "cpu, kind 0, sparse gradient",
                          "1 ('b'): float16, shape [1], on cpu, kind 1"));
}

TEST(ParameterTableTest, NumbersKindsByDtypeAndDevice) {
  const ParameterTable table({{at::ones({2}).requires_grad_(),
                               at::ones({2}, at::kDouble).requires_grad_(),
                               at::ones({3}).requires_grad_()}},
                             {}, {});
  EXPECT_EQ(table.specs()[0].kind, table.specs()[2].kind);
  EXPECT_NE(table.specs()[0].kind, table.specs()[1].kind);
  EXPECT_EQ(table.specs()[1].size_bytes, 16);
}

TEST(ParameterTableTest, ParametersOfTwoDevicesGetBucketsPerDevice) {
  const at::TensorOptions on_meta = at::TensorOptions(at::kMeta);
  const ParameterTable table(
      {{at::ones({2}).requires_grad_(), at::ones({2}, on_meta).requires_grad_(),
        at::ones({3}).requires_grad_(),
        at::ones({3}, on_meta).requires_grad_()}},
      {}, {});
  const BucketPlan plan = *plan_by_size(
      table.specs(), std::vector<size_t>{3, 2, 1, 0}, kDefaultBucketCapsBytes);
  EXPECT_THAT(plan.buckets(),
              ElementsAre(ElementsAre(3, 1), ElementsAre(2, 0)));
  const BucketPlan mixed = *BucketPlan::create({{0, 1}, {2, 3}}, 4);
  EXPECT_FALSE(check_bucket_kinds(mixed, table.specs()).ok());
}

TEST(ParameterTableTest, NumbersVariablesReplicaByReplica) {
  const auto tensor = [] { return at::ones({2}).requires_grad_(); };
  const ParameterTable table(
      {{tensor(), tensor(), tensor()}, {tensor(), tensor(), tensor()}}, {}, {});
  EXPECT_EQ(table.size(), 3);
  EXPECT_EQ(table.num_variables(), 6);
  const VariableIndex variable = {.replica = 1, .parameter = 2};
  EXPECT_EQ(table.number_of(variable), 5);
  EXPECT_EQ(table.variable(5), variable);
  EXPECT_TRUE(table[variable].is_same(table.replicas()[1][2]));
}

TEST(ParameterTableTest, RejectsReplicasThatDiffer) {
  const auto tensor = [](int64_t n) { return at::ones({n}).requires_grad_(); };
  const at::Tensor shared = tensor(2);
  const auto text = [](std::vector<std::vector<at::Tensor>> replicas) {
    return text_of<c10::ValueError>(
        [&] { ParameterTable(std::move(replicas), {}, {}); });
  };
  EXPECT_EQ(text({{tensor(2)}, {tensor(3)}}),
            "parameter 0 of replica 1 must match that of replica 0, float32, "
            "shape [2], on cpu; found float32, shape [3], on cpu");
  EXPECT_EQ(text({{tensor(2)}, {}}),
            "replica 1 must have the 1 parameters of replica 0, it has 0");
  EXPECT_EQ(text({{shared}, {shared}}),
            "parameter 0 of replica 1 is the same tensor as parameter 0 of "
            "replica 0.\nList it once.");
}

TEST(ErrorTextsTest, NameWhatWasFrozenMeanwhile) {
  const ParameterTable table = table_of(3, true);
  const IterationId id = {.iteration = 2, .rank = 0};
  table.tensors()[1].set_requires_grad(false);
  EXPECT_EQ(
      describe_missing_gradients(table, std::vector<size_t>{1}, id,
                                 ReducerOptions()),
      "Reducer: 1 of 3 parameters got no gradient in iteration 2 on rank 0: "
      "parameter 1 ('b'). Frozen since the module was wrapped: parameter 1 "
      "('b').\n"
      "Freeze parameters before the module is wrapped, wrap it again, or set "
      "find_unused_parameters.");
  EXPECT_THAT(
      describe_missing_gradients(table, std::vector<size_t>{1, 2}, id,
                                 ReducerOptions()),
      AllOf(HasSubstr("Frozen since the module was wrapped: parameter 1 "
                      "('b').\n"),
            HasSubstr("Use every output")));
}

}  // namespace
}  // namespace brigade
