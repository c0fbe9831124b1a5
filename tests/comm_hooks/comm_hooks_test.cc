#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/averaging_hook.h"
#include "brigade/comm_hooks/function_hook.h"
#include "brigade/comm_hooks/hook_result.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/comm_hooks/routing_hook.h"
#include "brigade/comm_hooks/step_in_backward.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::HasSubstr;

TEST(AllReduceHookTest, DeclaresScaleAndDtype) {
  const auto group = single_process_group();
  EXPECT_EQ(all_reduce_hook(group)->wire_format(at::kFloat),
            (WireFormat{.dtype = at::kFloat, .scale = 1.0}));
  EXPECT_EQ(fp16_hook(group)->wire_format(at::kFloat).dtype, at::kHalf);
  EXPECT_EQ(bf16_hook(group)->wire_format(at::kDouble).dtype, at::kBFloat16);
}

TEST(AllReduceHookTest, DoesNotCompressWhatItCannot) {
  const auto group = single_process_group();
  EXPECT_EQ(fp16_hook(group)->wire_format(at::kComplexFloat).dtype,
            at::kComplexFloat);
  EXPECT_EQ(fp16_hook(group)->wire_format(at::kBFloat16).dtype, at::kBFloat16);
}

TEST(AllReduceHookTest, RefusesNoGroup) {
  EXPECT_THROW(all_reduce_hook(nullptr), c10::ValueError);
}

TEST(HookTraitsTest, OfABuiltInHook) {
  const std::shared_ptr<AveragingHook> hook = fp16_hook(single_process_group());
  const HookTraits traits = traits_of(*hook);
  EXPECT_EQ(traits.hook, hook.get());
  EXPECT_EQ(traits.wire_format, hook.get());
  EXPECT_EQ(traits.wire_dtype(at::kFloat), at::kHalf);
  EXPECT_EQ(traits.listener, nullptr);
  EXPECT_TRUE(traits.fails_by_network_only);
  EXPECT_TRUE(traits.lets_go_of_buffer);
  EXPECT_FALSE(traits.throws_own_errors);
  EXPECT_EQ(traits.name, "");
}

class EverythingAHookCanSay final : public c10d::CommHookInterface,
                                    public IterationListener,
                                    public HasHookName,
                                    public ThrowsOwnErrors {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket&) override {
    return nullptr;
  }
  at::Tensor parseHookResult(const c10::IValue&) override { return {}; }
  void iteration_begins(bool) override {}
  std::string hook_name() const override { return "everything"; }
};

TEST(HookTraitsTest, OfAUsersHook) {
  EverythingAHookCanSay hook;
  const HookTraits traits = traits_of(hook);
  EXPECT_EQ(traits.wire_format, nullptr);
  EXPECT_EQ(traits.wire_dtype(at::kFloat), at::kFloat);
  EXPECT_EQ(traits.listener, &hook);
  EXPECT_FALSE(traits.fails_by_network_only);
  EXPECT_FALSE(traits.lets_go_of_buffer);
  EXPECT_TRUE(traits.throws_own_errors);
  EXPECT_FALSE(traits.steps_parameters);
  EXPECT_EQ(traits.name, "everything");
}

TEST(HookTraitsTest, WhatIsRoutedToAHookThatStepsIsStepped) {
  const auto hook = all_reduce_hook(single_process_group());
  const auto steps = step_in_backward(hook, [](const at::Tensor&) {});
  RoutingHook without(hook, {{.parameters = {}, .hook = hook}});
  RoutingHook with(hook, {{.parameters = {}, .hook = steps}});
  EXPECT_TRUE(traits_of(*steps).steps_parameters);
  EXPECT_FALSE(traits_of(without).steps_parameters);
  EXPECT_TRUE(traits_of(with).steps_parameters);
}

// A continuation is dropped on a thread of the group that the hook may own.
using HookAroundAnother =
    std::function<std::shared_ptr<c10d::CommHookInterface>(
        std::shared_ptr<c10d::CommHookInterface>)>;

class ContinuationTest : public ::testing::TestWithParam<HookAroundAnother> {};

TEST_P(ContinuationTest, DoesNotOwnTheHookItGoesOnBehind) {
  const at::Tensor parameter = at::zeros({2});
  const auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
  auto inner = make_comm_hook([future](c10d::GradBucket&) { return future; });
  const std::weak_ptr<c10d::CommHookInterface> watched = inner;
  auto outer = GetParam()(std::move(inner));
  c10d::GradBucket bucket(0, 1, at::zeros({2}), {0}, {2}, {parameter.sizes()},
                          {parameter}, {});
  const auto result = outer->runHook(bucket);
  EXPECT_FALSE(watched.expired());
  outer = nullptr;
  EXPECT_TRUE(watched.expired());
  future->markCompleted(at::ones({2}));
  EXPECT_TRUE(result->completed());
  EXPECT_TRUE(at::equal(parameter, at::zeros({2})));
}

INSTANTIATE_TEST_SUITE_P(Hooks, ContinuationTest,
                         ::testing::Values(
                             [](std::shared_ptr<c10d::CommHookInterface> hook) {
                               return step_in_backward(
                                   std::move(hook),
                                   [](const at::Tensor& parameter) {
                                     at::Tensor target = parameter;
                                     target.add_(1);
                                   });
                             },
                             [](std::shared_ptr<c10d::CommHookInterface> hook) {
                               return std::make_shared<RoutingHook>(
                                   std::move(hook), std::vector<Route>{});
                             }));

TEST(FunctionHookTest, RefusesNoFunction) {
  EXPECT_THROW(make_comm_hook(nullptr), c10::ValueError);
}

TEST(HookResultTest, TakesATensorOrAListOfOne) {
  const at::Tensor tensor = at::ones({3});
  EXPECT_TRUE(tensor_of_hook_result(tensor).is_same(tensor));
  EXPECT_TRUE(
      tensor_of_hook_result(std::vector<at::Tensor>{tensor}).is_same(tensor));
}

TEST(HookResultTest, NoneIsAnUndefinedTensor) {
  EXPECT_FALSE(tensor_of_hook_result(c10::IValue()).defined());
}

TEST(HookResultTest, RefusesAnythingElse) {
  EXPECT_THROW(tensor_of_hook_result(std::string("no")), c10::TypeError);
  EXPECT_THROW(tensor_of_hook_result(at::Tensor()), c10::TypeError);
  EXPECT_THROW(tensor_of_hook_result(std::vector<at::Tensor>(1)),
               c10::TypeError);
  EXPECT_THROW(tensor_of_hook_result(std::vector<at::Tensor>{}),
               c10::TypeError);
  EXPECT_THROW(tensor_of_hook_result(std::vector<at::Tensor>(2)),
               c10::TypeError);
}

}  // namespace
}  // namespace brigade
