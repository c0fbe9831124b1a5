// What runs between a unit's last gradient and its reduction: no kernel, and no
// copy beside the gradient's own into its place.

#include "brigade/tests/fsdp/launch_path.h"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/noting_hook.h"
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

using testing::kLastGradient;
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

std::vector<Names> operators_of_events() {
  return testing::operators_before_reductions(
      events, [](const std::string& event) { return event == kReduction; });
}

// Adds a parameter's sum; backward says when it has the gradient, 3 everywhere,
// if that is a unit's last.
struct AddSum : torch::autograd::Function<AddSum> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& input,
                            const at::Tensor& parameter, bool is_last) {
    context->saved_data["numel"] = parameter.numel();
    context->saved_data["is_last"] = is_last;
    return input + parameter.sum();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const int64_t numel = context->saved_data["numel"].toInt();
    const at::Tensor of_parameter = torch::full({numel}, 3.0F);
    if (context->saved_data["is_last"].toBool()) {
      events.emplace_back(kLastGradient);
    }
    return {gradients[0], of_parameter, at::Tensor()};
  }
};

constexpr size_t kNumUnits = 3;
constexpr int64_t kNumel = 7;

// Of the last of three steps, when all memory is there. Units have two
// parameters of kNumel elements, and `num_more`.
std::vector<Names> operators_of_step(const Group& group,
                                     ShardingOptions options, int num_more) {
  options.comm_hook = std::make_shared<testing::NotingHook>(
      [] { events.emplace_back(kReduction); });
  std::vector<UnitSpec> specs;
  for (size_t unit = 0; unit < kNumUnits; ++unit) {
    UnitSpec& spec = specs.emplace_back();
    spec.name = "units." + std::to_string(unit);
    spec.parameters.push_back(
        {.name = "a", .tensor = torch::ones({kNumel}).requires_grad_()});
    spec.parameters.push_back(
        {.name = "b",
         .tensor = torch::ones({kNumel + num_more}).requires_grad_()});
  }
  ShardedRoot root(specs, group, options);
  std::vector<Names> found;
  for (int step = 0; step < 3; ++step) {
    at::Tensor y = root.forward([&] {
      at::Tensor h = torch::ones({}).requires_grad_();
      for (size_t unit = 0; unit < kNumUnits; ++unit) {
        h = root.call(unit, h, [&](const at::Tensor& x) {
          const auto& [a, b] = std::tie(specs[unit].parameters[0].tensor,
                                        specs[unit].parameters[1].tensor);
          return AddSum::apply(AddSum::apply(x, a, /*is_last=*/true), b,
                               /*is_last=*/false);
        });
      }
      return h;
    });
    const Recording recording;
    y.backward();
    found = operators_of_events();
    EXPECT_EQ(std::ranges::count(events, kReduction),
              static_cast<int64_t>(kNumUnits));
  }
  for (const at::Tensor& shard : root.shards()) {
    if (shard.numel() == 0) continue;
    EXPECT_EQ(shard.grad().min().item<float>(), 9.0F);  // of three steps
  }
  return found;
}

TEST(LaunchPathTest, NothingRunsBetweenTheLastGradientAndItsReduction) {
  for (const int world_size : {2, 4}) {
    run_ranks(world_size, [](const Group& group) {
      for (const int num_more : {0, 1}) {  // cut evenly, and padded
        for (const ShardingOptions& options :
             {ShardingOptions(), shard_gradients(), shard_optimizer_state(),
              ShardingOptions{.num_shards = 1},
              ShardingOptions{.num_shards = 2}}) {
          EXPECT_THAT(operators_of_step(group, options, num_more),
                      AllOf(SizeIs(kNumUnits), Each(IsEmpty())))
              << num_more;
        }
      }
    });
  }
}

// In another dtype than autograd's, a gradient is cast into its place.
TEST(LaunchPathTest, WhatRunsThereIsSeen) {
  run_ranks(2, [](const Group& group) {
    EXPECT_THAT(operators_of_step(group, {.reduce_dtype = at::kDouble}, 0),
                AllOf(SizeIs(kNumUnits), Each(Contains("aten::copy_"))));
  });
}

}  // namespace launch_path_test
}  // namespace brigade
