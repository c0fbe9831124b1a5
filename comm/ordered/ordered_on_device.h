// Sums over ranks whose bits are those of ordered_collectives.h, of tensors on
// devices: collectives of the group's backend move slices, which are added up
// here, in the order of the ranks.
//
// Every rank sends each other one its slice (an all-to-all), adds up what it
// gets, and sends the sum back (an all-gather): a ring's bytes. All is launched
// by the call, on a stream of this object's own behind the calling thread's
// current one. Futures of the backend make streams wait, so that no host does.
//
// Thread safety: one call at a time, in the same order on all ranks.

#ifndef BRIGADE_COMM_ORDERED_ORDERED_ON_DEVICE_H_
#define BRIGADE_COMM_ORDERED_ORDERED_ON_DEVICE_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

class OrderedOnDevice {
 public:
  // `row_size`: as OrderedOptions::group_size.
  explicit OrderedOnDevice(std::optional<int> row_size) : row_size_(row_size) {}

  // Replaces `tensor` [any shape], contiguous and of real or complex numbers,
  // by the sum over ranks, times `scale`. The future holds a list of it. Two
  // collectives of `group`, or none of a tensor without elements or in a world
  // of 1. Takes memory of the tensor's size, of 1/W of it three times (float16
  // and bfloat16: four), of 1/F of it for rows of F, and of the tensor's size
  // once more where the number of ranks does not divide its elements; all
  // before it launches. Errors: OutOfMemoryError, and nothing is launched then;
  // what the backend throws.
  c10::intrusive_ptr<c10::ivalue::Future> all_reduce(c10d::ProcessGroup& group,
                                                     const at::Tensor& tensor,
                                                     double scale);

 private:
  c10::intrusive_ptr<c10::ivalue::Future> reduce_here(c10d::ProcessGroup& group,
                                                      const at::Tensor& tensor,
                                                      double scale) const;
  c10::Stream stream_of(c10::Device device);

  const std::optional<int> row_size_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_ORDERED_ON_DEVICE_H_
