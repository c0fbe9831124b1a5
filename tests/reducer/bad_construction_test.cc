#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using testing::expect_trains;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::text_of;
using testing::ToyModel;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Construction: each mistake by type and text, on one rank of two.
class BadConstructionTest : public ::testing::Test {
 protected:
  void expect_value_error(std::vector<at::Tensor> parameters,
                          const ReducerOptions& options,
                          const std::string& text) {
    EXPECT_THAT(text_of<c10::ValueError>([&] {
                  Reducer(parameters, single_process_group(), options);
                }),
                HasSubstr(text));
    // The other rank is without fault; both raise.
    run_ranks(2, [&](const Group& group) {
      const bool at_fault = group->getRank() == 1;
      const ToyModel good({{2}, {3}});
      EXPECT_THAT(text_of<c10::ValueError>([&] {
                    at_fault ? Reducer(parameters, group, options)
                             : Reducer(good.parameters, group);
                  }),
                  AllOf(HasSubstr(text), HasSubstr("rank 1")));
      // The group is as usable as before.
      Reducer reducer(good.parameters, group);
      expect_trains(reducer, good, group->getRank(), 2);
    });
  }

  const ToyModel model_{{{2}, {3}}};
};

TEST_F(BadConstructionTest, NoParameters) {
  expect_value_error({}, {}, "at least 1 parameter that requires a gradient");
}

TEST_F(BadConstructionTest, FrozenParameter) {
  expect_value_error({model_.parameters[0], at::ones({1})},
                     {.parameter_names = {"good", "frozen"}},
                     "parameter 1 ('frozen') must require a gradient");
}

TEST_F(BadConstructionTest, NonLeaf) {
  expect_value_error({model_.parameters[0] * 2}, {},
                     "parameter 0 must be a leaf, it is the result of Mul");
}

TEST_F(BadConstructionTest, Undefined) {
  expect_value_error({at::Tensor()}, {}, "parameter 0 must be a tensor");
}

TEST_F(BadConstructionTest, Duplicate) {
  expect_value_error(
      {model_.parameters[0], model_.parameters[1], model_.parameters[0]},
      {.parameter_names = {"a", "b", "c"}},
      "parameter 2 ('c') is the same tensor as parameter 0 ('a')");
}

TEST_F(BadConstructionTest, CapOfZero) {
  expect_value_error(model_.parameters, {.bucket_caps_bytes = {0}},
                     "bucket cap 0 must be > 0 bytes, got 0");
  expect_value_error(model_.parameters, {.bucket_caps_bytes = {8, -1}},
                     "bucket cap 1 must be > 0 bytes, got -1");
}

TEST_F(BadConstructionTest, PlanThatMissesOrRepeatsAParameter) {
  expect_value_error(model_.parameters, {.bucket_plan = {{0}}},
                     "parameter 1 must be in exactly one bucket");
  expect_value_error(model_.parameters, {.bucket_plan = {{0, 1}, {1}}},
                     "found it in buckets 0 and 1");
  expect_value_error(model_.parameters, {.bucket_plan = {{0, 1, 2}}},
                     "lists parameter 2, but there are only 2");
}

TEST_F(BadConstructionTest, PlanThatMixesDtypes) {
  expect_value_error(
      {model_.parameters[0], at::ones({1}, at::kDouble).requires_grad_()},
      {.bucket_plan = {{0, 1}}}, "mixes dtypes or devices");
}

TEST_F(BadConstructionTest, NamesOrFlagsOfAnotherLength) {
  expect_value_error(model_.parameters, {.parameter_names = {"only one"}},
                     "one entry for each of 2 parameters, got 1");
  expect_value_error(model_.parameters, {.expect_sparse_gradients = {true}},
                     "one entry for each of 2 parameters, got 1");
}

TEST_F(BadConstructionTest, TooFewOrManyUnconfirmedIterations) {
  for (const int number : {-1, 33}) {
    EXPECT_THAT(text_of<c10::ValueError>([&] {
                  Reducer(model_.parameters, single_process_group(),
                          {.max_unconfirmed_iterations = number});
                }),
                HasSubstr("max_unconfirmed_iterations must be 0 to 32, it is " +
                          std::to_string(number)));
  }
}

TEST_F(BadConstructionTest, NoGroup) {
  EXPECT_THAT(
      text_of<c10::ValueError>([&] { Reducer(model_.parameters, nullptr); }),
      HasSubstr("needs a process group, got null"));
}

TEST(DifferentModelsTest, NamesRankParameterAndDifferenceOnEveryRank) {
  run_ranks(3, [](const Group& group) {
    const bool odd_one = group->getRank() == 1;
    const ToyModel model(odd_one ? ToyModel::Sizes{{2}, {3, 4}}
                                 : ToyModel::Sizes{{2}, {4, 3}});
    EXPECT_THAT(
        text_of<c10::ValueError>([&] {
          Reducer(model.parameters, group, {.parameter_names = model.names});
        }),
        AllOf(HasSubstr("parameter 1"), HasSubstr("rank 1"),
              HasSubstr("[3, 4]"), HasSubstr("[4, 3]"), HasSubstr("'p1'"),
              HasSubstr("ranks 0, 2")));
  });
}

TEST(DifferentModelsTest, TellsCountsStridesAndDtypesApart) {
  const std::vector<std::vector<at::Tensor>> others = {
      {at::ones({2, 2})},
      {at::ones({2, 2}).t(), at::ones({1})},
      {at::ones({2, 2}, at::kDouble), at::ones({1})}};
  const std::vector<std::string> texts = {"2", "strides [1, 2]", "Double"};
  for (size_t k = 0; k < others.size(); ++k) {
    run_ranks(2, [&](const Group& group) {
      std::vector<at::Tensor> parameters = {at::ones({2, 2}), at::ones({1})};
      if (group->getRank() == 1) {
        parameters.clear();
        for (const at::Tensor& p : others[k]) {
          parameters.push_back(p.clone(at::MemoryFormat::Preserve));
        }
      }
      for (at::Tensor& p : parameters) p.requires_grad_();
      EXPECT_THAT(text_of<c10::ValueError>([&] { Reducer(parameters, group); }),
                  HasSubstr(texts[k]));
    });
  }
}

TEST(DifferentModelsTest, ComparesOptions) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}});
    EXPECT_THAT(
        text_of<c10::ValueError>([&] {
          Reducer(model.parameters, group,
                  {.bucket_caps_bytes = {100 + group->getRank()}});
        }),
        AllOf(HasSubstr("bucket_caps_bytes = [100]"), HasSubstr("[101]")));
    EXPECT_THAT(text_of<c10::ValueError>([&] {
                  Reducer(model.parameters, group,
                          {.max_unconfirmed_iterations = group->getRank()});
                }),
                HasSubstr("max_unconfirmed_iterations = "));
  });
}

}  // namespace
}  // namespace brigade
