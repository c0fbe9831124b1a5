#include "brigade/python_bindings/python_hooks.h"

#include <sys/types.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "brigade/comm/backends/end_on_own_thread.h"
#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {
namespace {

using Future = c10::ivalue::Future;
using FuturePtr = c10::intrusive_ptr<Future>;
using WeakFuture = c10::weak_intrusive_ptr<Future>;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kExitTimeout{3};
constexpr std::chrono::milliseconds kReleaseTimeout{100};
constexpr size_t kMaxCompletedFutures = 64;  // users may keep all futures alive

struct OpenFutures {
  const pid_t process = getpid();
  std::mutex mutex;
  std::deque<WeakFuture> futures;  // guarded by mutex
};

// Never destroyed: threads may use it during process exit.
OpenFutures& open_futures() {
  static OpenFutures& open = *new OpenFutures;
  return open;
}

bool is_open(const WeakFuture& weak) {
  const FuturePtr future = weak.lock();
  return future && !future->completed();
}

// Registers `future`, which may be null, for wait_at_exit(); returns it.
FuturePtr awaited_at_exit(FuturePtr future) {
  if (!future) return future;
  OpenFutures& open = open_futures();
  const std::lock_guard<std::mutex> lock(open.mutex);
  std::erase_if(open.futures,
                [](const WeakFuture& weak) { return weak.expired(); });
  while (open.futures.size() > kMaxCompletedFutures &&
         !is_open(open.futures.front())) {
    open.futures.pop_front();
  }
  open.futures.emplace_back(future);
  return future;
}

void wait_while(const std::function<bool()>& holds,
                Clock::time_point deadline) {
  while (holds() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }
}

// Names of the backends' threads that release tensors of collectives.
constexpr std::array<std::string_view, 2> kReleasingThreads = {
    "pt_gloo_runloop", "pt_nccl_watchdg"};

// `thread` is its folder in /proc.
bool is_busy(const std::filesystem::path& thread) {
  std::string name;
  std::getline(std::ifstream(thread / "comm"), name);
  if (std::ranges::find(kReleasingThreads, name) == kReleasingThreads.end()) {
    return false;
  }
  std::string line;
  std::getline(std::ifstream(thread / "stat"), line);
  const size_t end_of_name = line.rfind(") ");  // the state follows
  return end_of_name != std::string::npos && line[end_of_name + 2] == 'R';
}

bool is_any_thread_busy() {
  std::error_code ignored;
  const std::filesystem::directory_iterator threads("/proc/self/task", ignored);
  return std::any_of(begin(threads), end(threads), is_busy);
}

// Unlike c10d's class, checks that the hook returns a future.
class PythonCommHook final : public c10d::CommHookInterface,
                             public CommHookExtension {
 public:
  PythonCommHook(py::object state, py::object hook, std::string name)
      : state_(held_object(std::move(state))),
        hook_(held_object(std::move(hook))),
        name_(std::move(name)) {}

  HookTraits traits() const override {
    return {.throws_own_errors = true, .name = name_};
  }

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    const py::gil_scoped_acquire gil;
    const py::object future = (*hook_)(*state_, bucket);
    TORCH_CHECK(py::isinstance<torch::jit::PythonFutureWrapper>(future),
                describe_no_future(c10::str("comm hook '", name_, "'"), future),
                " (bucket ", bucket.getIndex(), ")");
    return awaited_at_exit(
        future.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut);
  }

  // Futures of collectives hold a list of tensors; other futures, an object.
  at::Tensor parseHookResult(const c10::IValue& result) override {
    if (!result.isPyObject()) return tensor_of_hook_result(result);
    const py::gil_scoped_acquire gil;
    return torch::jit::toIValue(torch::jit::toPyObject(result),
                                c10::TensorType::get())
        .toTensor();
  }

 private:
  const std::shared_ptr<py::object> state_;
  const std::shared_ptr<py::object> hook_;
  const std::string name_;
};

// Wraps the result of step_in_backward().
class PythonSteppingHook final : public WrappingHook {
 public:
  using WrappingHook::WrappingHook;

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    return awaited_at_exit(WrappingHook::runHook(bucket));
  }
};

}  // namespace

std::string describe_no_future(const std::string& function, py::handle found) {
  const bool is_tensor = THPVariable_Check(found.ptr());
  return c10::str(
      function, " must return torch.futures.Future[torch.Tensor], found ",
      is_tensor ? c10::str("a torch.Tensor of shape ",
                           THPVariable_Unpack(found.ptr()).sizes())
                : std::string(Py_TYPE(found.ptr())->tp_name),
      ".\nReturn `dist.all_reduce(..., async_op=True).get_future()`.");
}

CommHookPtr python_comm_hook(py::object state, py::object hook,
                             const std::string& name) {
  return std::make_shared<PythonCommHook>(std::move(state), std::move(hook),
                                          name);
}

std::shared_ptr<py::object> held_object(py::object object) {
  return {new py::object(std::move(object)), [](py::object* owned) {
            const py::gil_scoped_acquire gil;
            delete owned;
          }};
}

CommHookPtr python_stepping_hook(CommHookPtr hook, ParameterStep step,
                                 ParameterFilter is_stepped) {
  return std::make_shared<PythonSteppingHook>(step_in_backward(
      std::move(hook), std::move(step), std::move(is_stepped)));
}

void wait_at_exit() {
  const Clock::time_point begin = Clock::now();
  OpenFutures& open = open_futures();
  if (open.process != getpid()) return;  // the threads are the parent's
  const std::lock_guard<std::mutex> lock(open.mutex);
  for (const WeakFuture& future : open.futures) {
    wait_while([&] { return is_open(future); }, begin + kExitTimeout);
  }
  const Clock::time_point all_done = Clock::now();
  for (const WeakFuture& future : open.futures) {
    wait_while([&] { return !future.expired(); }, all_done + kReleaseTimeout);
  }
  open.futures.clear();
  wait_while([] { return num_ending_values > 0 || is_any_thread_busy(); },
             begin + kExitTimeout);
}

}  // namespace brigade
