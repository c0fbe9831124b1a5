// The storage of one bucket: gradients go in before it travels, results come
// out after.
//
// Dense gradients share one flat buffer (dense_replica.h); a sparse gradient
// has a bucket to itself (sparse_replica.h).
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_BUCKET_REPLICA_H_
#define BRIGADE_REDUCER_BUCKET_REPLICA_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace brigade {

class BucketReplica {
 public:
  virtual ~BucketReplica() = default;

  // Moves the gradients of all slots into buffer(), multiplied by `scale`. A
  // missing gradient counts as zero. `unused_slots`, ascending, got none in
  // this iteration; deliver() may have to leave theirs as they are. Returns the
  // bytes of gradients that were copied; gradients already in place are not.
  //
  // Errors: RuntimeError naming the parameter whose gradient does not fit.
  virtual int64_t pack(double scale, std::span<const size_t> unused_slots) = 0;

  // The gradients are read on `stream`, which is not where they were made.
  virtual void record_stream(c10::Stream stream) const = 0;

  // Adds the buffer of another local replica to this one's, wherever it lies.
  virtual void add(const at::Tensor& buffer) = 0;

  // What travels. Dense: 1D, [numel], wire dtype, the same tensor until the
  // next pack(); undefined while its memory is released.
  virtual const at::Tensor& buffer() const = 0;

  // Errors: RuntimeError if `result` can't be delivered.
  virtual void check_result(const at::Tensor& result) const = 0;

  // Hands the reduced buffer out as gradients. `result` may be buffer() itself
  // or another tensor on the same device. The gradients of
  // `globally_unused_slots`, some of those that pack() was told are unused,
  // stay as they were before it. Returns the bytes copied.
  //
  // Errors: RuntimeError if `result` does not have the bucket's numel or
  // device.
  virtual int64_t deliver(const at::Tensor& result,
                          std::span<const size_t> globally_unused_slots) = 0;

  // In place of deliver(): gradients are what the comm hook left, but those of
  // `globally_unused_slots` are as they were before pack().
  virtual void deliver_nothing(
      std::span<const size_t> globally_unused_slots) = 0;

  // Copies gradients that exist into the bucket and lets them be views of it,
  // so that the memory where they were is free. Only where gradients are views.
  virtual void adopt_gradients() = 0;

  // Lets go of the buffer until the next pack(). Gradients that are views of it
  // keep its memory, and are gradients like any other then.
  virtual void release_memory() = 0;

  // A stand-in for buffer() that holds zeros: for a collective whose result
  // nobody wants.
  virtual at::Tensor zeros() const = 0;

  // Gradients that are views lie in this tensor's memory. Undefined if there
  // are none.
  virtual const at::Tensor& views() const = 0;

  // True if `gradient` is the view in the bucket that belongs to a slot.
  virtual bool is_view_in(size_t slot, const at::Tensor& gradient) const = 0;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BUCKET_REPLICA_H_
