// Which of a group's channels one is: equal on all ranks, so that what one rank
// sends, calls or posts meets the same engine on the others.
//
// Thread safety: any thread.

#ifndef BRIGADE_COMM_GROUP_CHANNEL_IDENTITY_H_
#define BRIGADE_COMM_GROUP_CHANNEL_IDENTITY_H_

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

class ChannelIdentity {
 public:
  // Of something that all ranks make together.  To be called where they are
  // known to do so, in the same order everywhere.
  static ChannelIdentity made_together(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  // Of something that each rank makes by itself, and that meets the others'
  // later, in any order.  Ranks make these in the same order; one that makes
  // some that others don't puts only those that it makes later out of step.
  static ChannelIdentity made_alone(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  uint64_t number() const { return number_; }  // > 0

 private:
  explicit ChannelIdentity(uint64_t number) : number_(number) {}

  uint64_t number_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_CHANNEL_IDENTITY_H_
