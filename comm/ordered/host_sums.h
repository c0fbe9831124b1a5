// All-reduce through shared memory for a group whose ranks are on one host, in
// a third to a half of the time of Gloo's; and the count of a group's
// collectives.
//
//   if (const auto sums = HostSums::get_or_make(group, /*wants=*/true)) {
//     sums->all_reduce(bucket)->wait();
//   } else ...
//
// Thread safety: as OrderedCollectives.

#ifndef BRIGADE_COMM_ORDERED_HOST_SUMS_H_
#define BRIGADE_COMM_ORDERED_HOST_SUMS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/group/group_info.h"
#include "brigade/comm/ordered/ordered_collectives.h"

namespace brigade {

// All users of a group share one instance. Its sums count as the group's
// collectives, close_group() ends them, and profilers see "gloo:all_reduce".
class HostSums {
 public:
  // Collective. Returns null on all ranks unless all want it and share memory.
  // Returns null without communication in a world of 1, and if the CPU backend
  // is not Gloo: a user's backend sees all traffic.
  //
  // Errors: PeerError.
  static std::shared_ptr<HostSums> get_or_make(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group, bool wants);

  // Returns true for dense contiguous CPU tensors of a dtype that can_add().
  static bool can_reduce(const at::Tensor& tensor);

  // OrderedCollectives::all_reduce(), but the future's error is a RuntimeError,
  // like that of Gloo: the caller adds the context.
  OrderedCollectives::FuturePtr all_reduce(const at::Tensor& tensor);

  // Returns the number of the group's all_reduce() calls on this rank.
  static int64_t num_launches(const c10d::ProcessGroup& group);

 private:
  struct OfGroup;

  explicit HostSums(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  const std::shared_ptr<OfGroup> of_group_;
  const int64_t number_;  // equal on all ranks
  OrderedCollectives collectives_;
};

// Returns the number of collectives that a group has launched on this rank,
// including those of HostSums. Returns nullopt, slowly, if a backend does not
// count them; Gloo and NCCL do.
std::optional<int64_t> count_collectives(c10d::ProcessGroup& group);

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_HOST_SUMS_H_
