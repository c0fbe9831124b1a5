// The all-reduce of a group whose ranks are all on one host, through memory
// that they share (comm/ordered/ordered_collectives.h), which takes a third to
// a half of the time of Gloo's own.
//
//   if (const auto sums = HostSums::meet(group, /*wants=*/true)) {
//     sums->all_reduce(bucket)->wait();
//   } else ...
//
// It is the group's, whoever uses it: there is one at a time for each group,
// with one set of connections and threads, its sums count as the group's
// collectives (comm/collective_count.h), and closing the group ends them
// (comm/close_group.h).  Profilers see them as "gloo:all_reduce".  The sums'
// order is that of the ranks.
//
// Thread safety: as OrderedCollectives.

#ifndef BRIGADE_COMM_ORDERED_HOST_SUMS_H_
#define BRIGADE_COMM_ORDERED_HOST_SUMS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/group/channel_identity.h"
#include "brigade/comm/ordered/ordered_collectives.h"

namespace brigade {

class HostSums {
 public:
  // Collective, where ranks are known to stand in the same place.  Null on all
  // ranks unless all want it and share memory of one host.  Communicates
  // nothing if the group has one rank, or has another backend than Gloo for the
  // CPU: such as one of a user's own that sees what travels.  Else one
  // all-gather of 16 bytes per rank, and ranks connect if the group has none.
  //
  // Errors: PeerError if ranks don't meet.
  static std::shared_ptr<HostSums> meet(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group, bool wants);

  // Whether it adds up tensors like this one: dense numbers on the CPU.
  static bool can_reduce(const at::Tensor& tensor);

  // OrderedCollectives::all_reduce(), but the future ends with an error as the
  // group's would: whose sum it was is for the caller to say.
  OrderedCollectives::FuturePtr all_reduce(const at::Tensor& tensor);

  // Of the group on this rank so far, also by one that has ended.
  static int64_t num_launches(const c10d::ProcessGroup& group);

  // Sums of the group in flight and later ones end with an error that tells the
  // cause, here and on the other ranks.
  static void close(const c10d::ProcessGroup& group,
                    const std::exception_ptr& cause);

 private:
  struct OfGroup;

  HostSums(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
           std::shared_ptr<OfGroup> of_group);

  const std::shared_ptr<OfGroup> of_group_;
  const ChannelIdentity identity_;
  OrderedCollectives collectives_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_HOST_SUMS_H_
