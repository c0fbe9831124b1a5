// What runs between a unit's last gradient and its reduction: no kernel, and no
// copy beside the gradient's own into its place.

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "brigade/fsdp/reduction_hook.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace launch_path_test {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::IsEmpty;
using testing::run_ranks;
using ::testing::SizeIs;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Names = std::vector<std::string>;

constexpr std::string_view kLastGradient = "the last gradient is there";
constexpr std::string_view kReduction = "the reduction begins";

// What this thread runs, in order.
thread_local Names events;

std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
  events.emplace_back(function.name());
  return nullptr;
}

class Recording {
 public:
  Recording()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(note))) {
    events.clear();
  }
  ~Recording() { at::removeCallback(handle_); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  const at::CallbackHandle handle_;
};

bool makes_a_view(std::string_view name) {
  constexpr std::string_view kViews[] = {"aten::narrow", "aten::slice",
                                         "aten::as_strided", "aten::view",
                                         "aten::detach"};
  return std::ranges::find(kViews, name) != std::end(kViews);
}

// By reduction: the operators between the two.
std::vector<Names> operators_before_reductions() {
  std::vector<Names> found;
  bool is_between = false;
  for (const std::string& event : events) {
    if (event == kLastGradient) {
      found.emplace_back();
      is_between = true;
    } else if (event == kReduction) {
      is_between = false;
    } else if (is_between && event.starts_with("aten::") &&
               !makes_a_view(event)) {
      found.back().push_back(event);
    }
  }
  return found;
}

// As without a hook, but it says that it begins.
class NotingHook final : public ReductionHook {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> reduce(
      ShardTransport& transport, const Reduction& reduction) override {
    events.emplace_back(kReduction);
    return transport.reduce_scatter(reduction.whole, reduction.shard,
                                    reduction.sum);
  }
  std::string hook_name() const override { return "noting"; }
  bool fails_by_network_only() const override { return true; }
};

// Adds the two up; backward says when it has both gradients.
struct SumOfTwo : torch::autograd::Function<SumOfTwo> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& input, const at::Tensor& a,
                            const at::Tensor& b) {
    context->saved_data["numel"] = a.numel();
    return input + a.sum() + b.sum();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const int64_t numel = context->saved_data["numel"].toInt();
    torch::autograd::variable_list of_inputs = {
        gradients[0], torch::full({numel}, 1.0F), torch::full({numel}, 2.0F)};
    events.emplace_back(kLastGradient);
    return of_inputs;
  }
};

constexpr size_t kNumUnits = 3;
constexpr int64_t kNumel = 8;  // two of them are cut evenly

// Of the last of three steps, when all memory is there.
std::vector<Names> operators_of_step(const Group& group,
                                     ShardingOptions options) {
  options.comm_hook = std::make_shared<NotingHook>();
  std::vector<UnitSpec> specs;
  for (size_t unit = 0; unit < kNumUnits; ++unit) {
    UnitSpec& spec = specs.emplace_back();
    spec.name = "units." + std::to_string(unit);
    for (const char* name : {"a", "b"}) {
      spec.parameters.push_back(
          {.name = name, .tensor = torch::ones({kNumel}).requires_grad_()});
    }
  }
  ShardedRoot root(specs, group, options);
  std::vector<Names> found;
  for (int step = 0; step < 3; ++step) {
    at::Tensor y = root.forward([&] {
      at::Tensor h = torch::ones({}).requires_grad_();
      for (size_t unit = 0; unit < kNumUnits; ++unit) {
        h = root.call(unit, h, [&](const at::Tensor& x) {
          return SumOfTwo::apply(x, specs[unit].parameters[0].tensor,
                                 specs[unit].parameters[1].tensor);
        });
      }
      return h;
    });
    const Recording recording;
    y.backward();
    found = operators_before_reductions();
    EXPECT_EQ(std::ranges::count(events, kReduction),
              static_cast<int64_t>(kNumUnits));
  }
  for (const at::Tensor& shard : root.shards()) {
    if (shard.numel() == 0) continue;
    EXPECT_GE(shard.grad().min().item<float>(), 3.0F);  // of three steps
  }
  return found;
}

TEST(LaunchPathTest, NothingRunsBetweenTheLastGradientAndItsReduction) {
  run_ranks(2, [](const Group& group) {
    EXPECT_THAT(operators_of_step(group, {}),
                AllOf(SizeIs(kNumUnits), Each(IsEmpty())));
    EXPECT_THAT(operators_of_step(group, shard_optimizer_state()),
                AllOf(SizeIs(kNumUnits), Each(IsEmpty())));
    EXPECT_THAT(operators_of_step(group, {.num_shards = 1}),
                AllOf(SizeIs(kNumUnits), Each(IsEmpty())));
  });
}

// In another dtype than autograd's, a gradient is cast into its place.
TEST(LaunchPathTest, WhatRunsThereIsSeen) {
  run_ranks(2, [](const Group& group) {
    EXPECT_THAT(operators_of_step(group, {.reduce_dtype = at::kDouble}),
                AllOf(SizeIs(kNumUnits), Each(Contains("aten::copy_"))));
  });
}

}  // namespace launch_path_test
}  // namespace brigade
