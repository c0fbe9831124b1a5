// What runs on a device between a unit's last gradient and its reduction: that
// gradient's way into its place, and with a comm hook the division, so that the
// hook need not know of it.

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/fsdp/reduction_hook.h"
#include "brigade/fsdp/segmented_model.h"
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

constexpr std::string_view kLastGradient = "the last gradient is there";

// They take no kernel.
bool makes_a_view(std::string_view name) {
  constexpr std::string_view kViews[] = {"aten::as_strided", "aten::detach",
                                         "aten::empty",      "aten::narrow",
                                         "aten::slice",      "aten::view"};
  return std::ranges::find(kViews, name) != std::end(kViews);
}

// By reduction: the operators behind the last gradient, up to the first event
// that `is_reduction`.
template <typename IsReduction>
std::vector<Names> operators_before_reductions(
    const Names& all, const IsReduction& is_reduction) {
  std::vector<Names> found;
  bool is_between = false;
  for (const std::string& event : all) {
    if (event == kLastGradient) {
      found.emplace_back();
      is_between = true;
    } else if (is_reduction(event)) {
      is_between = false;
    } else if (is_between && event.starts_with("aten::") &&
               !makes_a_view(event)) {
      found.back().push_back(event);
    }
  }
  return found;
}

// What runs on any thread, in order: autograd has one for the device.
std::mutex mutex;
Names events;

void note(std::string name) {
  const std::lock_guard<std::mutex> lock(mutex);
  events.push_back(std::move(name));
}

// Operators that this thread is in: what they are made of is not told.
thread_local int depth = 0;

bool is_operator(const at::RecordFunction& function) {
  return std::string_view(function.name()).starts_with("aten::");
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  if (!is_operator(function) || depth++ == 0) note(function.name());
  return nullptr;
}

void end(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  if (is_operator(function)) --depth;
}

class Recording {
 public:
  Recording()
      : handle_(at::addGlobalCallback(at::RecordFunctionCallback(begin, end))) {
    const std::lock_guard<std::mutex> lock(mutex);
    events.clear();
  }
  ~Recording() { at::removeCallback(handle_); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  const at::CallbackHandle handle_;
};

// A unit's collective is the first to be launched behind its last gradient.
std::vector<Names> kernels_before_reductions() {
  return operators_before_reductions(events, [](const std::string& event) {
    return event.starts_with("c10d::");
  });
}

// Adds a parameter; backward says when it has the gradient if that is a unit's
// last, which may lie where the model wants it.
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
    if (context->saved_data["is_last"].toBool()) {
      note(std::string(kLastGradient));
    }
    return {gradients[0], of_parameter, at::Tensor(), at::Tensor(),
            at::Tensor()};
  }
};

class PassesOn final : public ReductionHook {
 public:
  FuturePtr reduce(ShardTransport& transport,
                   const Reduction& reduction) override {
    return transport.reduce_scatter(reduction.whole, reduction.shard,
                                    reduction.sum);
  }
  std::string hook_name() const override { return "passes on"; }
  bool fails_by_network_only() const override { return true; }
};

constexpr size_t kNumUnits = 3;
constexpr int64_t kNumel = 8;

class LaunchPathStreamsTest : public simulated::StreamTest {
 protected:
  // Of the last of three steps, when all memory is there.
  static std::vector<Names> kernels_of_step(const FullyShardOptions& options,
                                            bool in_slot) {
    const RecordingGroup recording(/*world_size=*/2);
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
    SegmentedModel model(make_sharded_units(units, recording.group(), options),
                         recording.group(), options);
    std::vector<Names> found;
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
      const Recording recorded;
      loss.backward(at::ones({kNumel}, on_device()));
      found = kernels_before_reductions();
    }
    return found;
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
