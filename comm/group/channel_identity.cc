#include "brigade/comm/group/channel_identity.h"

#include <atomic>

#include "brigade/comm/group/per_group.h"

namespace brigade {
namespace {

struct Counts {
  std::atomic<uint64_t> together = 0;
  std::atomic<uint64_t> alone = 0;
};

}  // namespace

ChannelIdentity ChannelIdentity::made_together(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return ChannelIdentity(2 * ++per_group<Counts>(group)->together - 1);
}

ChannelIdentity ChannelIdentity::made_alone(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return ChannelIdentity(2 * ++per_group<Counts>(group)->alone);
}

}  // namespace brigade
