// The all-reduce of a group whose ranks are all on one host, through memory
// that they share: a third to a half of the time of Gloo's own. And the number
// of a group's collectives.
//
//   if (const auto sums = HostSums::meet(group, /*wants=*/true)) {
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

// Each group has at most one at a time, for all its users: its sums count as
// the group's collectives, closing the group ends them, and profilers see them
// as "gloo:all_reduce".
class HostSums {
 public:
  // Collective: all ranks call it at the same place of their programs. Returns
  // null on all ranks unless all want it and share memory, and null without
  // communication if the group has one rank or another CPU backend than Gloo: a
  // user's own backend sees all traffic.
  //
  // Errors: PeerError if ranks don't meet.
  static std::shared_ptr<HostSums> meet(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group, bool wants);

  // Whether it adds up tensors like this one: dense numbers on the CPU.
  static bool can_reduce(const at::Tensor& tensor);

  // OrderedCollectives::all_reduce(), but the future ends with an error as the
  // group's would: the caller says whose sum it was.
  OrderedCollectives::FuturePtr all_reduce(const at::Tensor& tensor);

  // Sums of the group on this rank so far.
  static int64_t num_launches(const c10d::ProcessGroup& group);

 private:
  struct OfGroup;

  explicit HostSums(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  const std::shared_ptr<OfGroup> of_group_;
  const int64_t number_;  // equal on all ranks
  OrderedCollectives collectives_;
};

// Returns the number of collectives that a group has launched on this rank, in
// shared memory too, for comparison with a later one. Nothing, slowly, if a
// backend does not count; Gloo and NCCL do.
std::optional<int64_t> count_collectives(c10d::ProcessGroup& group);

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_HOST_SUMS_H_
