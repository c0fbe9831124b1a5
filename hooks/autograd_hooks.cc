#include "brigade/hooks/autograd_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <ranges>
#include <utility>

namespace brigade {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::AutogradMeta;
using torch::autograd::Engine;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::SavedVariableHooks;
using torch::autograd::variable_list;
using torch::autograd::impl::try_get_grad_accumulator;

constexpr size_t kCacheLineBytes = 64;

// Prefetches an object, which may be null, for a write.
template <typename T>
void prefetch(const T* object) {
  const char* const begin = reinterpret_cast<const char*>(object);
  for (size_t offset = 0; offset < sizeof(T); offset += kCacheLineBytes) {
    __builtin_prefetch(begin + offset, /*write=*/1);
  }
}

}  // namespace

// Base of hooks that compiled autograd can't trace. `Hook`: of torch.
template <typename Hook>
class UntracedHook : public Hook {
  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(
        false,
        "brigade: compiled autograd can't trace a backward whose gradients a "
        "reducer reduces.\nSet torch._dynamo.config.optimize_ddp = "
        "\"python_reducer\" before wrapping the model, or leave compiled "
        "autograd off.");
  }
};

// Gradients become ready in nearly the same order in every backward, and an
// accumulator has left the caches by its next use. Each hook remembers the hook
// that was called after it, and prefetches the memory that this one will use.
class ReadyHook final : public UntracedHook<torch::autograd::FunctionPostHook> {
 public:
  ReadyHook(GradientHooks& owner, VariableIndex variable,
            const Node* accumulator, const at::Tensor& parameter)
      : owner_(owner),
        variable_(variable),
        accumulator_(static_cast<const AccumulateGrad*>(accumulator)),
        parameter_(parameter.unsafeGetTensorImpl()),
        autograd_meta_(torch::autograd::impl::get_autograd_meta(parameter)) {}

  variable_list operator()(const variable_list& outputs,
                           const variable_list& inputs) override {
    prefetch_next();
    owner_.listener_(variable_, inputs.at(0).defined() || is_taken_);
    return outputs;  // empty: an accumulator has no next edges
  }

  void take(const at::Tensor& gradient) {
    is_taken_ = gradient.defined();
    if (is_taken_) owner_.sink_(variable_, gradient);
  }

 private:
  // Concurrent backwards may record a wrong successor; the only effect is a
  // useless prefetch. All hooks of an owner live equally long.
  void prefetch_next() {
    ReadyHook* const previous =
        owner_.last_called_.load(std::memory_order_relaxed);
    owner_.last_called_.store(this, std::memory_order_relaxed);
    if (previous != nullptr) {
      previous->next_.store(this, std::memory_order_relaxed);
    }
    const ReadyHook* const next = next_.load(std::memory_order_relaxed);
    if (next == nullptr) return;
    prefetch(next->accumulator_);
    prefetch(next->parameter_);
    prefetch(next->autograd_meta_);
    const ReadyHook* const second = next->next_.load(std::memory_order_relaxed);
    if (second != nullptr) prefetch(second);
  }

  GradientHooks& owner_;
  const VariableIndex variable_;
  // Prefetched, never read.
  const AccumulateGrad* const accumulator_;
  const at::TensorImpl* const parameter_;
  const AutogradMeta* const autograd_meta_;

  std::atomic<ReadyHook*> next_ = nullptr;
  bool is_taken_ = false;  // in the current call
};

// Passes the gradient to the sink and replaces it with an undefined one: the
// accumulator then calls its post-hooks without changing `.grad`.
class SinkHook final : public UntracedHook<FunctionPreHook> {
 public:
  // REQUIRES: `ready`, of the same accumulator, outlives this object.
  explicit SinkHook(ReadyHook& ready) : ready_(ready) {}

  variable_list operator()(const variable_list& gradients) override {
    ready_.take(gradients.at(0));
    return {at::Tensor()};
  }

 private:
  ReadyHook& ready_;
};

GradientHooks::GradientHooks(std::span<const std::vector<at::Tensor>> replicas,
                             Listener listener, Sink sink)
    : listener_(std::move(listener)), sink_(std::move(sink)) {
  try {
    for (size_t r = 0; r < replicas.size(); ++r) {
      for (size_t i = 0; i < replicas[r].size(); ++i) {
        add(replicas[r][i], {.replica = r, .parameter = i});
      }
    }
  } catch (...) {
    remove();
    throw;
  }
}

GradientHooks::~GradientHooks() { remove(); }

void GradientHooks::add(const at::Tensor& parameter, VariableIndex variable) {
  NodePtr accumulator = torch::autograd::impl::grad_accumulator(parameter);
  auto hook = std::make_unique<ReadyHook>(*this, variable, accumulator.get(),
                                          parameter);
  ReadyHook& ready = *hook;
  const uintptr_t key = accumulator->add_post_hook(std::move(hook));
  Registration& registration = registrations_.emplace_back(
      Registration{std::move(accumulator), key, nullptr});
  if (!sink_) return;
  auto sink_hook = std::make_unique<SinkHook>(ready);
  registration.sink_hook = sink_hook.get();
  registration.accumulator->add_pre_hook(std::move(sink_hook));
}

void GradientHooks::remove() {
  for (const auto& [accumulator, key, sink_hook] : registrations_) {
    // Autograd can remove post-hooks by key, but not pre-hooks.
    std::erase_if(accumulator->pre_hooks(),
                  [removed = sink_hook](const auto& hook) {
                    return hook.get() == removed;
                  });
    accumulator->del_post_hook(key);
  }
  registrations_.clear();
  last_called_ = nullptr;
}

std::optional<VariableIndex> GradientHooks::first_detached(
    std::span<const std::vector<at::Tensor>> replicas) const {
  if (registrations_.empty()) return std::nullopt;
  auto registration = registrations_.begin();
  for (size_t r = 0; r < replicas.size(); ++r) {
    for (size_t i = 0; i < replicas[r].size(); ++i, ++registration) {
      // Does not read the accumulator, which may not be cached.
      const WeakNodePtr& current =
          torch::autograd::impl::get_autograd_meta(replicas[r][i])
              ->grad_accumulator_;
      if (!points_to(current, registration->accumulator)) {
        return VariableIndex{.replica = r, .parameter = i};
      }
    }
  }
  return std::nullopt;
}

std::vector<Node*> GradientHooks::accumulators() const {
  std::vector<Node*> accumulators;
  accumulators.reserve(registrations_.size());
  for (const Registration& registration : registrations_) {
    accumulators.push_back(registration.accumulator.get());
  }
  return accumulators;
}

// ---- Outputs, and the end of a backward.

namespace {

class OutputHook final : public UntracedHook<FunctionPreHook> {
 public:
  OutputHook(size_t output, std::weak_ptr<void> owner,
             std::function<void()> on_reached)
      : output_(output),
        owner_(std::move(owner)),
        on_reached_(std::move(on_reached)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (!gradients.at(output_).defined()) return gradients;
    if (std::shared_ptr<void> alive = owner_.lock()) on_reached_();
    return gradients;
  }

 private:
  const size_t output_;  // index among the node's outputs
  const std::weak_ptr<void> owner_;
  const std::function<void()> on_reached_;
};

// Owned by a callback of the graph task. If backward throws, autograd destroys
// the callback without calling it.
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
      TORCH_WARN(
          "brigade: the cleanup of a backward that threw has failed too: ",
          error.what());
    }
  }

  Sentinel(const Sentinel&) = delete;
  Sentinel& operator=(const Sentinel&) = delete;

  void arm() { armed_ = true; }

  // Calls end() after all callbacks that were queued earlier and the callbacks
  // that these queue: requeues itself, since a new callback runs last.
  static void queue_end(std::shared_ptr<Sentinel> sentinel,
                        int num_requeues = 2) {
    Engine::get_default_engine().queue_callback(
        [sentinel = std::move(sentinel), num_requeues] {
          if (num_requeues == 0) return sentinel->end();
          queue_end(sentinel, num_requeues - 1);
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

struct Segment {
  std::weak_ptr<void> owner;
  std::function<void()> on_end;
  std::function<void()> on_abandoned;
};

std::mutex mutex;
std::map<int, std::vector<Segment>> open_segments;  // by backward; not empty

void end_segments(int backward, bool is_abandoned) {
  std::vector<Segment> segments;
  {
    const std::lock_guard lock(mutex);
    segments = std::move(open_segments[backward]);
    open_segments.erase(backward);
  }
  std::exception_ptr error;
  for (const Segment& segment : segments | std::views::reverse) {
    const auto owner = segment.owner.lock();
    if (!owner) continue;
    if (is_abandoned || error != nullptr) {
      segment.on_abandoned();
      continue;
    }
    try {
      segment.on_end();
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error != nullptr) std::rethrow_exception(error);
}

ErrorTaker take_error = nullptr;

bool is_gradient_hook(const torch::autograd::FunctionPostHook& hook) {
  return dynamic_cast<const ReadyHook*>(&hook) != nullptr;
}

void call_hooks(const std::vector<at::Tensor>& tensors) {
  std::exception_ptr first;
  const auto attempt = [&](const auto& call) {
    try {
      call();
    } catch (std::exception& error) {
      if (take_error != nullptr) take_error(error);
      if (first == nullptr) first = std::current_exception();
    }
  };
  for (const at::Tensor& tensor : tensors) {
    const auto& hooks = torch::autograd::impl::post_acc_grad_hooks(tensor);
    if (hooks != nullptr) attempt([&] { (*hooks)(tensor); });
    // Torch's optimizers in backward register hooks on the accumulator.
    const auto accumulator = try_get_grad_accumulator(tensor);
    if (!accumulator) continue;
    for (const auto& hook : accumulator->post_hooks()) {
      if (is_gradient_hook(*hook)) continue;  // brigade's own
      attempt([&] { (*hook)({}, {tensor.grad()}); });
    }
  }
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace

bool watch_outputs(std::span<const at::Tensor> outputs,
                   std::weak_ptr<void> owner,
                   std::function<void()> on_reached) {
  bool watches_any = false;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    output.grad_fn()->add_tensor_pre_hook(
        std::make_unique<OutputHook>(output.output_nr(), owner, on_reached));
    watches_any = true;
  }
  return watches_any;
}

void watch_backward_end(std::weak_ptr<void> owner, std::function<void()> on_end,
                        std::function<void()> on_abandoned) {
  auto sentinel = std::make_shared<Sentinel>(
      std::move(owner), std::move(on_end), std::move(on_abandoned));
  Sentinel::queue_end(sentinel);
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

void end_with_backward(std::weak_ptr<void> owner, std::function<void()> on_end,
                       std::function<void()> on_abandoned) {
  const int backward = running_backward_id();
  {
    const std::lock_guard lock(mutex);
    std::vector<Segment>& segments = open_segments[backward];
    segments.push_back({.owner = std::move(owner),
                        .on_end = std::move(on_end),
                        .on_abandoned = std::move(on_abandoned)});
    if (segments.size() > 1) return;
  }
  const auto watched = std::make_shared<char>();
  watch_backward_end(
      watched, [watched, backward] { end_segments(backward, false); },
      [backward] { end_segments(backward, true); });
}

// ---- The user's post-accumulate-grad hooks.

void set_error_taker(ErrorTaker taker) { take_error = taker; }

HiddenPostAccumulateHooks::HiddenPostAccumulateHooks(
    const std::vector<at::Tensor>& leaves) {
  for (const at::Tensor& leaf : leaves) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(leaf);
    if (hook != nullptr) hidden_.push_back({leaf, std::move(hook)});
  }
}

HiddenPostAccumulateHooks::~HiddenPostAccumulateHooks() {
  for (Hidden& hidden : hidden_) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(hidden.leaf);
    if (hook == nullptr) hook = std::move(hidden.hook);
  }
}

bool has_post_accumulate_hooks(const at::Tensor& tensor) {
  if (torch::autograd::impl::post_acc_grad_hooks(tensor) != nullptr) {
    return true;
  }
  const auto accumulator = try_get_grad_accumulator(tensor);
  return accumulator &&
         std::ranges::any_of(accumulator->post_hooks(), [](const auto& hook) {
           return !is_gradient_hook(*hook);
         });
}

void call_hooks_after_backward(std::vector<at::Tensor> tensors) {
  if (running_backward_id() < 0) return call_hooks(tensors);
  const auto shared =
      std::make_shared<std::vector<at::Tensor>>(std::move(tensors));
  watch_backward_end(
      shared, [shared] { call_hooks(*shared); }, [] {});
}

// ---- Saved tensors.

namespace {

thread_local const SavedTensorScope* innermost_scope = nullptr;
thread_local bool is_installed = false;  // set by SavedTensorEngine

size_t num_python_hooks() {
  return at::SavedTensorDefaultHooks::get_tls_state().stack.size();
}

}  // namespace

class SavedTensorEngine final : public Engine {
 public:
  // Makes this the default engine, unless the default engine already calls it.
  static void install() {
    is_installed = false;
    Engine::get_default_engine().get_default_saved_variable_hooks();
    if (is_installed) return;
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    Engine& current = Engine::get_default_engine();
    if (&current == &instance()) return;
    instance().next_ = &current;
    torch::autograd::set_default_engine_stub(
        []() -> Engine& { return instance(); });
  }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks()
      override {
    is_installed = true;
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
  // Never destroyed: threads of the wrapped engine may outlive statics.
  static SavedTensorEngine& instance() {
    static auto* const engine = new SavedTensorEngine();
    return *engine;
  }

  Engine& next() { return *next_.load(); }

  std::atomic<Engine*> next_ = nullptr;
};

SavedTensorScope::SavedTensorScope(MakeHooks make_hooks)
    : make_hooks_(std::move(make_hooks)),
      outer_(innermost_scope),
      num_python_hooks_(num_python_hooks()) {
  SavedTensorEngine::install();
  innermost_scope = this;
}

SavedTensorScope::~SavedTensorScope() { innermost_scope = outer_; }

}  // namespace brigade
