// The saved tensors of one run of a function, got by running it again.
//
// Behind checkpoint() of the kind that is not reentrant. Each saved tensor of
// the first run is a place in a list. The first one that is asked for runs the
// function again and fills the list; a place is emptied when its tensor is
// given out, and all that is left when the backward ends. Leaves that require a
// gradient are parameters, alive anyway: they are kept.
//
// Thread safety: all methods; the function runs with the lock held.

#ifndef BRIGADE_HOOKS_RECOMPUTATION_H_
#define BRIGADE_HOOKS_RECOMPUTATION_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "brigade/hooks/kept_inputs.h"
#include "brigade/hooks/run_conditions.h"
#include "brigade/hooks/saved_tensor_scope.h"

namespace brigade {

class Recomputation : public std::enable_shared_from_this<Recomputation> {
 public:
  using Function = std::function<void(std::span<const at::Tensor>)>;

  // Made just before the first run, on its thread.
  Recomputation(std::span<const at::Tensor> inputs, bool preserve_rng_state,
                Function function);

  // While it lives, what this thread's autograd saves becomes a place.
  class FirstRun {
   public:
    explicit FirstRun(std::shared_ptr<Recomputation> recomputation);
    ~FirstRun();

    FirstRun(const FirstRun&) = delete;
    FirstRun& operator=(const FirstRun&) = delete;

   private:
    const std::shared_ptr<Recomputation> recomputation_;
    const SavedTensorScope scope_;
  };

  // The new place of a tensor that the first run saves.
  size_t add(const at::Tensor& tensor);

  // The tensor of a place. Errors: those of checkpoint().
  at::Tensor take(size_t place);

 private:
  // A tensor at the moment when autograd saved it.
  struct Saved {
    at::Tensor tensor;  // undefined where nothing is kept
    uint32_t version = 0;
    const void* memory = nullptr;  // never read, compared only
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> sizes;
  };
  struct Place {
    Saved first;  // holds a tensor if that is a parameter
    at::Tensor again;
  };

  static Saved describe(const at::Tensor& tensor);
  static std::string describe_change(const Saved& first, int64_t version);
  void recompute();
  void check(const std::vector<Saved>& again) const;
  void forget();

  const KeptInputs inputs_;
  const RunConditions conditions_;
  const Function function_;

  std::recursive_mutex mutex_;
  // Guarded by mutex_.
  std::vector<Place> places_;
  bool first_run_is_over_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_RECOMPUTATION_H_
