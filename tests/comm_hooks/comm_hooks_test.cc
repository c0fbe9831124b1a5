#include "brigade/comm_hooks/comm_hooks.h"

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

HookTraits traits_in(const CommHookPtr& hook) { return traits_of(*hook); }

TEST(AllReduceHookTest, DeclaresScaleAndDtype) {
  const auto group = single_process_group();
  const CommHookPtr hook = all_reduce_hook(group);
  EXPECT_EQ(traits_in(hook).wire_format->wire_format(at::kFloat),
            (WireFormat{.dtype = at::kFloat, .scale = 1.0}));
  EXPECT_EQ(traits_in(bf16_hook(group)).name, "");
}

TEST(AllReduceHookTest, CompressesLargerFloatingPointOnly) {
  const CommHookPtr hook = fp16_hook(single_process_group());
  const HookTraits traits = traits_in(hook);
  EXPECT_EQ(traits.wire_dtype(at::kFloat), at::kHalf);
  EXPECT_EQ(traits.wire_dtype(at::kComplexFloat), at::kComplexFloat);
  EXPECT_EQ(traits.wire_dtype(at::kBFloat16), at::kBFloat16);
  EXPECT_TRUE(traits.fails_by_network_only);
  EXPECT_TRUE(traits.releases_buffer);
  EXPECT_FALSE(traits.throws_own_errors);
}

TEST(AllReduceHookTest, RejectsANullGroup) {
  EXPECT_THROW(all_reduce_hook(nullptr), c10::ValueError);
}

class NamedHook final : public c10d::CommHookInterface,
                        public CommHookExtension {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket&) override {
    return nullptr;
  }
  at::Tensor parseHookResult(const c10::IValue&) override { return {}; }
  HookTraits traits() const override {
    return {.throws_own_errors = true, .name = "named"};
  }
};

TEST(HookTraitsTest, OfAUsersHookAndItsWrapper) {
  const auto hook = std::make_shared<NamedHook>();
  WrappingHook wrapper(hook);
  EXPECT_EQ(traits_in(hook).wire_format, nullptr);
  EXPECT_EQ(traits_of(wrapper).wire_dtype(at::kFloat), at::kFloat);
  for (const HookTraits& traits : {traits_in(hook), traits_of(wrapper)}) {
    EXPECT_FALSE(traits.fails_by_network_only);
    EXPECT_FALSE(traits.releases_buffer);
    EXPECT_TRUE(traits.throws_own_errors);
    EXPECT_FALSE(traits.steps_parameters);
    EXPECT_EQ(traits.name, "named");
  }
}

// A callback is destroyed on a thread of the group, which the hook may own.
TEST(StepInBackwardTest, CallbackDoesNotOwnTheHook) {
  const at::Tensor parameter = at::zeros({2});
  const auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
  auto inner = make_comm_hook([future](c10d::GradBucket&) { return future; });
  const std::weak_ptr<c10d::CommHookInterface> watched = inner;
  auto outer =
      step_in_backward(std::move(inner), [](const at::Tensor& stepped) {
        at::Tensor target = stepped;
        target.add_(1);
      });
  EXPECT_TRUE(traits_of(*outer).steps_parameters);
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

// The example of then_collective().
TEST(ThenCollectiveTest, AveragesInScaledFloat16) {
  testing::run_ranks(2, [](const auto& group) {
    auto hook = make_comm_hook([group](c10d::GradBucket& bucket) {
      const at::Tensor buffer = bucket.getBuffer();
      std::vector<at::Tensor> scale = {
          buffer.abs().amax().clamp_min(1e-30).view({1})};
      const auto largest =
          group->allreduce(scale, {.reduceOp = c10d::ReduceOp::MAX});
      return then_collective(largest->getFuture(), [=](const c10::IValue&) {
        std::vector<at::Tensor> sent = {(buffer / scale[0]).to(at::kHalf)};
        const int size = group->getSize();
        return group->allreduce(sent)->getFuture()->then(
            [=](auto&) { return c10::IValue(sent[0] * (scale[0] / size)); },
            c10::TensorType::get());
      });
    });
    const at::Tensor parameter = at::zeros({3});
    const float own = 2.0F * static_cast<float>(group->getRank());
    c10d::GradBucket bucket(0, 1, at::tensor({own, 4 * own, 6.0F}), {0}, {3},
                            {parameter.sizes()}, {parameter}, {});
    const auto result = hook->runHook(bucket);
    result->waitAndThrow();
    EXPECT_TRUE(
        at::equal(result->value().toTensor(), at::tensor({1.0F, 4.0F, 6.0F})));
  });
}

TEST(FunctionHookTest, RejectsAnEmptyFunction) {
  EXPECT_THROW(make_comm_hook(nullptr), c10::ValueError);
}

TEST(HookResultTest, AcceptsATensorOrAListOfOne) {
  const at::Tensor tensor = at::ones({3});
  EXPECT_TRUE(tensor_of_hook_result(tensor).is_same(tensor));
  EXPECT_TRUE(
      tensor_of_hook_result(std::vector<at::Tensor>{tensor}).is_same(tensor));
}

TEST(HookResultTest, NoneIsAnUndefinedTensor) {
  EXPECT_FALSE(tensor_of_hook_result(c10::IValue()).defined());
}

TEST(HookResultTest, RejectsOtherValues) {
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
