// Gradients of a distributed-autograd backward, which lie in its context: while
// a reduction lasts they are lent to `.grad`.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_CONTEXT_GRADIENTS_H_
#define BRIGADE_REDUCER_CONTEXT_GRADIENTS_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <unordered_map>

#include "brigade/reducer/bucket_memory.h"

namespace torch::distributed::autograd {
class DistAutogradContext;
}  // namespace torch::distributed::autograd

namespace brigade {

class ContextGradients {
 public:
  ContextGradients() = default;

  // Gives `.grad` back as it was. Averages that write_back() did not take are
  // lost.
  ~ContextGradients();

  ContextGradients(const ContextGradients&) = delete;
  ContextGradients& operator=(const ContextGradients&) = delete;

  // A defined gradient of `parameter` has been accumulated: lends it to `.grad`
  // if this thread runs a backward of distributed autograd. Keeps the former
  // `.grad`; a copy of it if it lies in `buckets`, which will be written.
  void take(const at::Tensor& parameter, const MemoryRanges& buckets);

  // Puts `.grad` into the context, and gives the former `.grad` back.
  void write_back();

 private:
  struct Lent {
    at::Tensor parameter;
    at::Tensor own_gradient;  // the former `.grad`; may be undefined
  };

  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;
  std::unordered_map<const c10::TensorImpl*, Lent> lent_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_CONTEXT_GRADIENTS_H_
