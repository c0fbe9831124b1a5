#include "brigade/python_bindings/awaited_futures.h"

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/output_hooks.h"

namespace brigade {

void AwaitedFutures::add(std::vector<Future> futures) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Future& future : futures) futures_.push_back(std::move(future));
}

std::vector<AwaitedFutures::Future> AwaitedFutures::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(futures_, {});
}

void AwaitedFutures::wait_after_backward(
    const std::vector<at::Tensor>& outputs) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (futures_.empty()) return;
  }
  const std::weak_ptr<AwaitedFutures> weak = weak_from_this();
  watch_outputs(outputs, weak, [this, weak] {
    watch_backward_end(
        weak, [this] { wait(); },
        [this] {
          try {
            wait();
          } catch (const std::exception& error) {
            TORCH_WARN("while another error ended backward: ", error.what());
          }
        });
  });
}

void AwaitedFutures::wait() {
  std::exception_ptr first_error;
  for (const Future& future : take()) {
    try {
      future->waitAndThrow();
    } catch (...) {
      if (!first_error) first_error = std::current_exception();
    }
  }
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace brigade
