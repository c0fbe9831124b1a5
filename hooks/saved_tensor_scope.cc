#include "brigade/hooks/saved_tensor_scope.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "brigade/hooks/autograd_node.h"

namespace brigade {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

thread_local const SavedTensorScope* innermost_scope = nullptr;
thread_local bool was_asked = false;

size_t num_python_hooks() {
  return at::SavedTensorDefaultHooks::get_tls_state().stack.size();
}

}  // namespace

class AskingEngine final : public Engine {
 public:
  // Takes its place before the default engine unless it is asked already.
  static void take_place() {
    was_asked = false;
    Engine::get_default_engine().get_default_saved_variable_hooks();
    if (was_asked) return;
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    Engine& present = Engine::get_default_engine();
    if (&present == &instance()) return;
    instance().next_ = &present;
    torch::autograd::set_default_engine_stub(
        []() -> Engine& { return instance(); });
  }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks()
      override {
    was_asked = true;
    if (!innermost_scope ||
        num_python_hooks() > innermost_scope->num_python_hooks_) {
      return next().get_default_saved_variable_hooks();
    }
    return innermost_scope->make_hooks_();
  }

  torch::autograd::variable_list execute(
      const torch::autograd::edge_list& roots,
      const torch::autograd::variable_list& inputs, bool keep_graph,
      bool create_graph, bool accumulate_grad,
      const torch::autograd::edge_list& outputs) override {
    return next().execute(roots, inputs, keep_graph, create_graph,
                          accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
      NodePtr graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return next().execute_with_graph_task(graph_task, std::move(graph_root),
                                          std::move(input_buffer));
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata()
      override {
    return next().make_anomaly_metadata();
  }

  void thread_on_exception(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
      const NodePtr& fn, std::exception& error) override {
    next().thread_on_exception(graph_task, fn, error);
  }

  void thread_init(
      int device,
      const std::shared_ptr<torch::autograd::ReadyQueue>& ready_queue,
      bool should_increment) override {
    next().thread_init(device, ready_queue, should_increment);
  }

#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>>
  get_node_creation_hooks() override {
    return next().get_node_creation_hooks();
  }
#endif

 private:
  // Never destroyed: threads of the engine behind it may outlive statics.
  static AskingEngine& instance() {
    static auto* const engine = new AskingEngine();
    return *engine;
  }

  Engine& next() { return *next_.load(); }

  std::atomic<Engine*> next_ = nullptr;
};

SavedTensorScope::SavedTensorScope(MakeHooks make_hooks)
    : make_hooks_(std::move(make_hooks)),
      outer_(innermost_scope),
      num_python_hooks_(num_python_hooks()) {
  AskingEngine::take_place();
  innermost_scope = this;
}

SavedTensorScope::~SavedTensorScope() { innermost_scope = outer_; }

}  // namespace brigade
