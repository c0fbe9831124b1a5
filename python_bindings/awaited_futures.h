// Futures that a backward shall not end before, such as those of a hook that
// reduces buffers while backward runs.
//
// Thread safety: any thread may call any method.

#ifndef BRIGADE_PYTHON_BINDINGS_AWAITED_FUTURES_H_
#define BRIGADE_PYTHON_BINDINGS_AWAITED_FUTURES_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <mutex>
#include <vector>

namespace brigade {

class AwaitedFutures : public std::enable_shared_from_this<AwaitedFutures> {
 public:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;

  void add(std::vector<Future> futures);

  // Waits at the end of the backward that goes through `outputs`. Free if there
  // is nothing to wait for.
  void wait_after_backward(const std::vector<at::Tensor>& outputs);

  // Waits for all, then throws the first error.
  void wait();

 private:
  std::vector<Future> take();

  std::mutex mutex_;
  std::vector<Future> futures_;  // guarded by mutex_
};

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_AWAITED_FUTURES_H_
