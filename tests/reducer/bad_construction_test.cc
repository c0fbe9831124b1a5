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

// A mistake on one rank of two is an error on both.
TEST(BadConstructionTest, IsAnErrorOnAllRanks) {
  struct Mistake {
    std::vector<at::Tensor> parameters;
    ReducerOptions options;
    std::string text;
  };
  const ToyModel model({{2}, {3}});
  const std::vector<at::Tensor>& good = model.parameters;
  const std::vector<Mistake> mistakes = {
      {{}, {}, "at least 1 parameter that requires a gradient"},
      {{good[0], at::ones({1})},
       {.parameter_names = {"good", "frozen"}},
       "parameter 1 ('frozen') must require a gradient"},
      {{good[0] * 2},
       {},
       "parameter 0 must be a leaf tensor, found the result of Mul"},
      {{at::Tensor()}, {}, "parameter 0 must be a tensor"},
      {{good[0], good[1], good[0]},
       {.parameter_names = {"a", "b", "c"}},
       "parameter 2 ('c') is the same tensor as parameter 0 ('a')"},
      {good,
       {.bucket_cap_bytes = {0}},
       "bucket cap 0 must be > 0 bytes, got 0"},
      {good,
       {.bucket_cap_bytes = {8, -1}},
       "bucket cap 1 must be > 0 bytes, got -1"},
      {good, {.bucket_plan = {{0}}}, "Reducer: bucket_plan lacks parameter 1"},
      {good, {.bucket_plan = {{0, 1}, {1}}}, "in buckets 0 and 1"},
      {good,
       {.bucket_plan = {{0, 1, 2}}},
       "lists parameter 2, but there are only 2"},
      {{good[0], at::ones({1}, at::kDouble).requires_grad_()},
       {.bucket_plan = {{0, 1}}},
       "mixes dtypes or devices"},
      {good,
       {.parameter_names = {"only one"}},
       "one entry for each of 2 parameters, got 1"},
      {good,
       {.expect_sparse_gradients = {true}},
       "one entry for each of 2 parameters, got 1"},
      {good,
       {.max_unconfirmed_iterations = -1},
       "expected max_unconfirmed_iterations from 0 to 32, found -1"},
      {good,
       {.max_unconfirmed_iterations = 33},
       "expected max_unconfirmed_iterations from 0 to 32, found 33"},
  };
  for (const auto& [parameters, options, text] : mistakes) {
    EXPECT_THAT(text_of<c10::ValueError>([&] {
                  Reducer(parameters, single_process_group(), options);
                }),
                HasSubstr(text));
    run_ranks(2, [&](const Group& group) {
      const bool at_fault = group->getRank() == 1;
      const ToyModel own({{2}, {3}});
      EXPECT_THAT(text_of<c10::ValueError>([&] {
                    at_fault ? Reducer(parameters, group, options)
                             : Reducer(own.parameters, group);
                  }),
                  AllOf(HasSubstr(text), HasSubstr("rank 1")));
      // The group is still usable.
      Reducer reducer(own.parameters, group);
      expect_trains(reducer, own, group->getRank(), 2);
    });
  }
}

TEST(BadConstructionTest, NoGroup) {
  const ToyModel model({{2}, {3}});
  EXPECT_THAT(
      text_of<c10::ValueError>([&] { Reducer(model.parameters, nullptr); }),
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

TEST(DifferentModelsTest, ComparesCountsStridesAndDtypes) {
  const std::vector<std::vector<at::Tensor>> others = {
      {at::ones({2, 2})},
      {at::ones({2, 2}).t(), at::ones({1})},
      {at::ones({2, 2}, at::kDouble), at::ones({1})}};
  const std::vector<std::string> texts = {"2", "strides [1, 2]", "float64"};
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
    EXPECT_THAT(text_of<c10::ValueError>([&] {
                  Reducer(model.parameters, group,
                          {.bucket_cap_bytes = {100 + group->getRank()}});
                }),
                AllOf(HasSubstr("option bucket_cap_bytes differs"),
                      HasSubstr("rank 0: [100]"), HasSubstr("rank 1: [101]")));
    EXPECT_THAT(text_of<c10::ValueError>([&] {
                  Reducer(model.parameters, group,
                          {.max_unconfirmed_iterations = group->getRank()});
                }),
                HasSubstr("option max_unconfirmed_iterations differs"));
  });
}

}  // namespace
}  // namespace brigade
