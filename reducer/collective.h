// Interface of one collective of an iteration: a bucket's all-reduce, for
// example. All ranks launch the same sequence of these, in the same order.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_COLLECTIVE_H_
#define BRIGADE_REDUCER_COLLECTIVE_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"

namespace brigade {

// Identifies an iteration in messages.
struct IterationId {
  int64_t iteration = 0;
  int rank = 0;
};

// "iteration 17 on rank 2".
inline std::string describe(IterationId id) {
  return absl::StrCat("iteration ", id.iteration, " on rank ", id.rank);
}

class Collective {
 public:
  virtual ~Collective() = default;

  // Returns the bucket's index in timelines and messages. nullopt: not a
  // bucket, in neither, and not delivered at the end of the iteration.
  virtual std::optional<size_t> unit() const = 0;

  // Returns the number of gradients, over all local replicas, that it waits
  // for.
  virtual size_t num_awaited() const = 0;

  // Returns whether all ranks skip it in this iteration. REQUIRES: all entries
  // before it are launched. May wait for one of them, and throw its error.
  virtual bool is_left_out() = 0;

  // Returns whether gradients must be packed. Same requirement as
  // is_left_out(). A bucket without elements is left out and still packed.
  virtual bool needs_pack() = 0;

  // Fills the buffer. REQUIRES: all gradients are ready. Throws RuntimeError
  // that names a gradient of the wrong shape, dtype, layout or device.
  virtual void pack() = 0;

  // Returns null if there is nothing to wait for. `on_zeros`: for peers that
  // wait for this rank; gradients stay untouched. Throws the errors of the
  // collective or the comm hook.
  virtual c10::intrusive_ptr<c10::ivalue::Future> launch(bool on_zeros) = 0;

  // Returns the tensor in the future's value; undefined if there is none.
  // Throws TypeError or RuntimeError if it does not fit the bucket.
  virtual at::Tensor result_of(const c10::IValue& value) = 0;

  // Writes `result` to the gradients. Undefined: nothing was communicated.
  // REQUIRES: the future, if any, is complete. An entry without a unit waits
  // for its own future here, and throws its errors.
  virtual void deliver(const at::Tensor& result) = 0;

  virtual c10::Device device() const = 0;

  // Returns 0 without a unit, or if the buffer is sparse.
  virtual int64_t buffer_bytes() const { return 0; }

  // Returns true if no user code can fail in it: a failure is a peer's.
  virtual bool fails_by_network_only() const = 0;

  // "bucket 1 of 3 (parameter 4 ('head.weight'))".
  virtual std::string describe() const = 0;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_COLLECTIVE_H_
