#include "brigade/hooks/backward_end.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <utility>

namespace brigade {
namespace {

// Lives in the callback that the graph task holds.
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
