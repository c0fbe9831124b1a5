// Gives reduced gradients the memory of their bucket, in place of a copy of the
// result in theirs.
//
// That saves the pass over memory that copies results back, and the memory of
// either. Nobody can tell it from a copy: a gradient is given its place in the
// bucket only if it is as autograd made it in this backward and nobody else
// sees its memory, and it stays the same tensor. A bucket whose memory somebody
// still sees when it is packed again leaves it to them.
//
// On the CPU only: on other devices memory that streams still read would be
// written anew.
//
// Example:
//
//   MemoryHandover handover(flat, views);  // views share flat's memory
//   ...                                    // flat is packed and reduced
//   if (!handover.give(gradient, views[slot])) copy(flat, gradient);
//   ...
//   if (handover.is_taken()) flat = at::empty_like(flat);  // and its views
//
// Thread safety: none.

#ifndef BRIGADE_REDUCER_MEMORY_HANDOVER_H_
#define BRIGADE_REDUCER_MEMORY_HANDOVER_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

namespace brigade {

class MemoryHandover {
 public:
  // Below this a copy costs less than the handover.
  static constexpr int64_t kMinBytes = int64_t{64} << 10;

  // Never gives anything.
  MemoryHandover() = default;

  // REQUIRES: `flat` and tensors that are made before this object are all that
  // shares its memory.
  explicit MemoryHandover(const at::Tensor& flat);

  // Lets `gradient` lie in the memory of `view`, whose values, sizes and
  // strides are its own from then on. False, and nothing has happened, if its
  // memory may be seen by others, or has been written to since autograd made
  // it, or is not worth it.
  bool give(const at::Tensor& gradient, const at::Tensor& view);

  // Whether a gradient of this size may be given memory at all.
  bool is_worth(int64_t bytes) const {
    return own_references_ > 0 && bytes >= kMinBytes;
  }

  // True if somebody still sees memory that was given: holds a tensor in it, or
  // has moved it to where another process may look.
  bool is_taken() const;

 private:
  c10::Storage storage_;
  const void* memory_ = nullptr;
  size_t own_references_ = 0;
  bool given_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_MEMORY_HANDOVER_H_
