// Kernels between a unit's last gradient and its reduction: a copy of the
// gradient into its slot, and with a comm hook the division.

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "brigade/fsdp/reduction_hook.h"
#include "brigade/fsdp/segmented_model.h"
#include "brigade/tests/support/recording_group.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace launch_path_streams_test {

using simulated::on_device;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Names = std::vector<std::string>;

// Operators that run no kernel.
const std::set<std::string_view> kViews = {"aten::as_strided", "aten::detach",
                                           "aten::empty",      "aten::narrow",
                                           "aten::slice",      "aten::view"};

// By unit: the outermost operators between its last gradient and its
// collective, on any thread (autograd has one for the device).
std::mutex mutex;
std::vector<Names> kernels;      // guarded by mutex
bool has_last_gradient = false;  // guarded by mutex
thread_local int depth = 0;      // operators that this thread is in

bool is_operator(const at::RecordFunction& function) {
  return std::string_view(function.name()).starts_with("aten::");
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  const std::lock_guard<std::mutex> lock(mutex);
  if (is_operator(function)) {
    const bool is_outermost = depth++ == 0;
    if (is_outermost && has_last_gradient && !kViews.contains(name)) {
      kernels.back().emplace_back(name);
    }
  } else if (name.starts_with("c10d::")) {
    has_last_gradient = false;
  }
  return nullptr;
}

void end(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  if (is_operator(function)) --depth;
}

void note_last_gradient() {
  const std::lock_guard<std::mutex> lock(mutex);
  kernels.emplace_back();
  has_last_gradient = true;
}

// Adds a parameter. Its backward notes a unit's last gradient, and may write
// gradients into their slots.
struct Add : torch::autograd::Function<Add> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& input,
                            const at::Tensor& parameter, SegmentedModel* model,
                            bool is_last, bool in_slot) {
    context->save_for_backward({parameter});
    context->saved_data["model"] = reinterpret_cast<int64_t>(model);
    context->saved_data["is_last"] = is_last;
    context->saved_data["in_slot"] = in_slot;
    return input + parameter;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    auto& model = *reinterpret_cast<SegmentedModel*>(
        context->saved_data["model"].toInt());
    at::Tensor of_parameter =
        context->saved_data["in_slot"].toBool()
            ? model.gradient_slot(context->get_saved_variables().front())
            : at::Tensor();
    if (of_parameter.defined()) {
      of_parameter.copy_(gradients[0]);
    } else {
      of_parameter = gradients[0].clone();
    }
    if (context->saved_data["is_last"].toBool()) note_last_gradient();
    return {gradients[0], of_parameter, at::Tensor(), at::Tensor(),
            at::Tensor()};
  }
};

class PassesOn final : public ReductionHook {
 public:
  FuturePtr reduce(const Reduction& reduction) override {
    return reduction.sum(reduction.whole, reduction.shard);
  }
  std::string hook_name() const override { return "passes on"; }
  bool fails_by_network_only() const override { return true; }
};

constexpr size_t kNumUnits = 3;
constexpr int64_t kNumel = 8;

class LaunchPathStreamsTest : public simulated::StreamTest {
 protected:
  // In the last of three steps, when all memory is there.
  static std::vector<Names> kernels_of_step(const FullyShardOptions& options,
                                            bool in_slot) {
    const RecordingGroup group(/*world_size=*/2);
    std::vector<UnitRequest> units;
    for (size_t u = 0; u < kNumUnits; ++u) {
      UnitRequest& unit = units.emplace_back();
      unit.name = std::to_string(u);
      for (const char* name : {"a", "b"}) {
        unit.parameters.push_back(
            {.name = name,
             .tensor = at::ones({kNumel}, on_device()).requires_grad_()});
      }
    }
    SegmentedModel model(make_sharded_units(units, group.group(), options),
                         group.group(), options);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = model.forward([&] {
        at::Tensor h = at::ones({kNumel}, on_device());
        for (const UnitRequest& unit : units) {
          h = Add::apply(h, unit.parameters[0].tensor, &model,
                         /*is_last=*/true, in_slot);
          h = Add::apply(h, unit.parameters[1].tensor, &model,
                         /*is_last=*/false, in_slot);
        }
        return h;
      });
      kernels.clear();
      const auto recording =
          at::addGlobalCallback(at::RecordFunctionCallback(begin, end));
      loss.backward(at::ones({kNumel}, on_device()));
      at::removeCallback(recording);
    }
    return kernels;
  }
};

TEST_F(LaunchPathStreamsTest, AGradientThatIsInItsPlaceIsReducedAsItIs) {
  EXPECT_THAT(kernels_of_step({}, /*in_slot=*/true),
              AllOf(SizeIs(kNumUnits), Each(IsEmpty())));
}

TEST_F(LaunchPathStreamsTest, OthersAreCopiedThereOnce) {
  EXPECT_THAT(kernels_of_step({}, /*in_slot=*/false),
              AllOf(SizeIs(kNumUnits), Each(ElementsAre("aten::copy_"))));
}

TEST_F(LaunchPathStreamsTest, CommHooksGetWhatIsDivided) {
  EXPECT_THAT(kernels_of_step({.comm_hook = std::make_shared<PassesOn>()},
                              /*in_slot=*/true),
              AllOf(SizeIs(kNumUnits), Each(ElementsAre("aten::mul_"))));
}

}  // namespace launch_path_streams_test
}  // namespace brigade
