#include "brigade/hooks/backward_events.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <utility>

#include "brigade/hooks/gradient_hooks.h"

namespace brigade {
namespace {

using torch::autograd::variable_list;

class ReachedHook final : public torch::autograd::FunctionPreHook {
 public:
  ReachedHook(size_t output, std::weak_ptr<void> owner,
              std::function<void()> on_reached)
      : output_(output),
        owner_(std::move(owner)),
        on_reached_(std::move(on_reached)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (!gradients.at(output_).defined()) return gradients;
    if (std::shared_ptr<void> alive = owner_.lock()) on_reached_();
    return gradients;
  }

  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }

 private:
  const size_t output_;  // of the node
  const std::weak_ptr<void> owner_;
  const std::function<void()> on_reached_;
};

// Lives in the callback that the graph task holds, which autograd destroys
// without a call when backward throws.
class Sentinel {
 public:
  Sentinel(std::weak_ptr<void> owner, std::function<void()> on_end,
           std::function<void()> on_abandoned)
      : owner_(std::move(owner)),
        on_end_(std::move(on_end)),
        on_abandoned_(std::move(on_abandoned)) {}

  ~Sentinel() {
    if (!armed_) return;
    const std::shared_ptr<void> owner = owner_.lock();
    if (!owner) return;
    try {
      on_abandoned_();
    } catch (const std::exception& error) {
      TORCH_WARN("after another error ended backward: ", error.what());
    }
  }

  Sentinel(const Sentinel&) = delete;
  Sentinel& operator=(const Sentinel&) = delete;

  void arm() { armed_ = true; }

  // Callbacks of a graph task may add others to it, which run last.
  static void end_behind_others(std::shared_ptr<Sentinel> sentinel,
                                int times = 2) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [sentinel = std::move(sentinel), times] {
          if (times == 0) return sentinel->end();
          end_behind_others(sentinel, times - 1);
        });
  }

  void end() {
    armed_ = false;
    if (std::shared_ptr<void> owner = owner_.lock()) on_end_();
  }

 private:
  const std::weak_ptr<void> owner_;
  const std::function<void()> on_end_;
  const std::function<void()> on_abandoned_;
  bool armed_ = false;
};

}  // namespace

bool watch_outputs(std::span<const at::Tensor> outputs,
                   std::weak_ptr<void> owner,
                   std::function<void()> on_reached) {
  bool watches_any = false;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    output.grad_fn()->add_tensor_pre_hook(
        std::make_unique<ReachedHook>(output.output_nr(), owner, on_reached));
    watches_any = true;
  }
  return watches_any;
}

void watch_backward_end(std::weak_ptr<void> owner, std::function<void()> on_end,
                        std::function<void()> on_abandoned) {
  auto sentinel = std::make_shared<Sentinel>(
      std::move(owner), std::move(on_end), std::move(on_abandoned));
  Sentinel::end_behind_others(sentinel);
  sentinel->arm();
}

int running_backward_id() {
  return torch::autograd::get_current_graph_task_id();
}

bool accumulates_all_gradients() {
  const auto* const to_execute =
      torch::autograd::get_current_graph_task_exec_info();
  return to_execute != nullptr && to_execute->empty();
}

}  // namespace brigade
