// A hook's reference to its group, which does not keep the group alive.
//
// A backend that completes a bucket runs the hook's continuations on a thread
// of its own. If one of them held the last reference to the group, the group
// would end on that thread, and wait there for itself.
//
// Thread safety: all methods may be called from any thread.

#ifndef BRIGADE_COMM_HOOKS_GROUP_REFERENCE_H_
#define BRIGADE_COMM_HOOKS_GROUP_REFERENCE_H_

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

class GroupReference {
 public:
  // Errors: ValueError if `group` is null; `user` names who wants it.
  GroupReference(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                 const char* user)
      : group_(group), user_(user) {
    TORCH_CHECK_VALUE(group, user, " needs a process group, got null");
    size_ = group->getSize();
    rank_ = group->getRank();
  }

  // Errors: ValueError if the group is gone, which is no fault of the network.
  c10::intrusive_ptr<c10d::ProcessGroup> lock() const {
    c10::intrusive_ptr<c10d::ProcessGroup> group = group_.lock();
    TORCH_CHECK_VALUE(
        group, user_,
        ": its process group is gone.\nKeep the group, or the reducer that was "
        "made with it, as long as the hook is used.");
    return group;
  }

  int size() const { return size_; }
  int rank() const { return rank_; }

 private:
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  const char* user_;
  int size_ = 0;
  int rank_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_GROUP_REFERENCE_H_
