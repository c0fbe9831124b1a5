#include <torch/torch.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/all_reduce_hook.h"
#include "brigade/comm_hooks/function_hook.h"
#include "brigade/comm_hooks/hook_result.h"
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
