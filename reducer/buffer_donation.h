// Gives reduced gradients the memory of their bucket in place of a copy back,
// on the CPU. (On devices, streams may still read that memory.)
//
// A gradient is given its place in the bucket only if it is as autograd made it
// and nobody else holds it or its memory. It stays the same tensor. A bucket
// whose memory somebody still sees when it is packed again leaves it to them;
// after the second time its results are copied. Python keeps a storage that it
// has been shown once, which counts as seeing it.
//
// Example:
//
//   BufferDonation donation(flat);  // after the views of it have been made
//   ...                             // flat is packed and reduced
//   if (!donation.give(gradient, views[slot])) copy(flat, gradient);
//   ...
//   if (donation.is_taken()) {
//     flat = at::empty_like(flat);  // and its views
//     donation.leave(flat);
//   }
//
// Thread safety: none.

#ifndef BRIGADE_REDUCER_BUFFER_DONATION_H_
#define BRIGADE_REDUCER_BUFFER_DONATION_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace brigade {

class BufferDonation {
 public:
  // Below this a copy costs less.
  static constexpr int64_t kMinBytes = int64_t{64} << 10;

  // Buffers that are left before copies are made instead.
  static constexpr int kMaxLeft = 2;

  // Never gives anything.
  BufferDonation() = default;

  // REQUIRES: until leave(), the owner's tensors in the memory of `flat` are as
  // many as now whenever is_taken() is asked.
  explicit BufferDonation(const at::Tensor& flat);

  bool is_worthwhile(int64_t bytes) const {
    return own_references_ > 0 && bytes >= kMinBytes;
  }

  // Lets `gradient` lie in the memory of `view`, with its values. Returns false
  // without effect if somebody else holds the gradient or its memory, or has
  // written to it since autograd made it.
  //
  // REQUIRES: both have the same sizes, memory order, dtype and device; it is
  // worthwhile.
  bool give(const at::Tensor& gradient, const at::Tensor& view);

  // True if somebody still sees memory that was given: holds a tensor in it, or
  // has moved it to where another process may look.
  bool is_taken() const;

  // The owner has taken new memory. REQUIRES: as the constructor.
  void leave(const at::Tensor& flat);

 private:
  c10::Storage storage_;
  const void* memory_ = nullptr;
  size_t own_references_ = 0;  // 0: gives nothing
  bool given_ = false;
  int num_left_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BUFFER_DONATION_H_
