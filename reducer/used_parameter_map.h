// Which parameters got gradients on this rank, and which on any rank.
//
// A parameter that no rank and no local replica used, which is globally unused,
// keeps its gradient, and only a sum over all ranks tells which those are.
// Marks accumulate over iterations that are not reduced.
//
// The map is a CPU tensor that hooks write. What travels is a copy of it, on
// the device where buckets travel; on devices with streams the copy goes
// through a pinned buffer of its own, so that the host neither waits for the
// device nor changes what is still being copied.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_USED_PARAMETER_MAP_H_
#define BRIGADE_REDUCER_USED_PARAMETER_MAP_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

class UsedParameterMap {
 public:
  // `device`: where the sum over ranks is taken.
  UsedParameterMap(size_t num_replicas, size_t num_parameters,
                   c10::Device device);

  // `variable`: its number, replica by replica.
  void mark(size_t variable) { marks_[variable] = 1; }
  bool is_marked(size_t variable) const { return marks_[variable] != 0; }
  void clear_marks();

  // Int32, [num_replicas, num_parameters], on the CPU; 1 where a mark is. It is
  // the map itself, not a copy.
  const at::Tensor& local() const { return local_; }

  // Starts the sum over replicas and ranks. Does not wait. Collective. Returns
  // the future of the collective; null if the group's works have none.
  c10::intrusive_ptr<c10::ivalue::Future> launch(c10d::ProcessGroup& group);

  // Of the sum.
  c10::Device device() const { return sum_.device(); }

  // Does not wait for the sum any more, which may never come: the next one is
  // taken elsewhere. Returns the memory that this one may still be written to.
  at::Tensor abandon();

  // Waits until the sum is there for this thread to read; free if it is.
  // Errors: what the collective throws.
  void wait();

  // Any rank had marked it when the last sum was launched.
  // REQUIRES: wait() after launch().
  bool is_used_anywhere(size_t parameter) const {
    return host_sum_.const_data_ptr<int32_t>()[parameter] != 0;
  }

  // How many replicas of all ranks had marked each parameter when the last sum
  // was launched; zeros before. Int32, [num_parameters], on the CPU; the next
  // launch() changes it. REQUIRES: wait() after launch().
  const at::Tensor& counts() const { return host_sum_; }

 private:
  void finish();

  at::Tensor local_;  // int32, [num_parameters], CPU
  int32_t* marks_;    // elements of local_
  at::Tensor sum_;    // int32, [num_parameters], on the buckets' device
  at::Tensor
      host_sum_;  // the last sum, on the CPU; undefined: to be waited for
  c10::intrusive_ptr<c10d::Work> work_;  // null: nothing to wait for
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_USED_PARAMETER_MAP_H_
