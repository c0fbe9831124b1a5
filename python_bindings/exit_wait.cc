#include "brigade/python_bindings/exit_wait.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include "brigade/comm/backends/end_on_own_thread.h"

namespace brigade {
namespace {

using Future = c10::ivalue::Future;

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kPatience{3};
constexpr std::chrono::milliseconds kPatienceOnceDone{100};
constexpr size_t kDoneFuturesKept = 64;  // users may keep all of them

struct OpenFutures {
  const pid_t process = getpid();
  std::mutex mutex;
  std::deque<c10::weak_intrusive_ptr<Future>> futures;  // guarded by mutex
};

// Never destroyed: threads may use it while the process exits.
OpenFutures& open_futures() {
  static OpenFutures& open = *new OpenFutures;
  return open;
}

bool is_open(const c10::weak_intrusive_ptr<Future>& weak) {
  const c10::intrusive_ptr<Future> future = weak.lock();
  return future && !future->completed();
}

void drop_what_is_over(std::deque<c10::weak_intrusive_ptr<Future>>& futures) {
  std::erase_if(futures, [](const auto& future) { return future.expired(); });
  while (futures.size() > kDoneFuturesKept && !is_open(futures.front())) {
    futures.pop_front();
  }
}

void wait_while(const std::function<bool()>& holds,
                Clock::time_point deadline) {
  while (holds() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
  }
}

// Threads that drop tensors of collectives, by the names the system keeps of
// them.
constexpr std::array<std::string_view, 2> kDroppingThreads = {
    "pt_gloo_runloop", "pt_nccl_watchdg"};

// `thread`: its folder in /proc.
bool is_busy(const std::filesystem::path& thread) {
  std::string name;
  std::getline(std::ifstream(thread / "comm"), name);
  if (std::ranges::find(kDroppingThreads, name) == kDroppingThreads.end()) {
    return false;
  }
  std::string line;
  std::getline(std::ifstream(thread / "stat"), line);
  const size_t end_of_name = line.rfind(") ");  // its state follows
  return end_of_name != std::string::npos && line[end_of_name + 2] == 'R';
}

bool is_any_thread_busy() {
  std::error_code ignored;
  const std::filesystem::directory_iterator threads("/proc/self/task", ignored);
  return std::any_of(begin(threads), end(threads), is_busy);
}

}  // namespace

void wait_for_at_exit(const c10::intrusive_ptr<Future>& future) {
  OpenFutures& open = open_futures();
  const std::lock_guard<std::mutex> lock(open.mutex);
  drop_what_is_over(open.futures);
  open.futures.emplace_back(future);
}

void wait_at_exit() {
  const Clock::time_point begin = Clock::now();
  OpenFutures& open = open_futures();
  if (open.process != getpid()) return;  // the threads are the parent's
  const std::lock_guard<std::mutex> lock(open.mutex);
  for (const c10::weak_intrusive_ptr<Future>& future : open.futures) {
    wait_while([&] { return is_open(future); }, begin + kPatience);
  }
  const Clock::time_point all_done = Clock::now();
  for (const c10::weak_intrusive_ptr<Future>& future : open.futures) {
    wait_while([&] { return !future.expired(); }, all_done + kPatienceOnceDone);
  }
  open.futures.clear();
  wait_while([] { return num_ending_values > 0 || is_any_thread_busy(); },
             begin + kPatience);
}

}  // namespace brigade
