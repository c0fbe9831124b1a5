// A backend that answers for all ranks by itself, and so for some of them: the
// recording group's.

#ifndef BRIGADE_COMM_GROUP_SUBGROUP_ANSWERS_H_
#define BRIGADE_COMM_GROUP_SUBGROUP_ANSWERS_H_

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

class AnswersSubgroups {
 public:
  // A group of so many of the ranks, this one at place `rank` among them.
  virtual c10::intrusive_ptr<c10d::ProcessGroup> make_subgroup(
      int rank, int world_size) = 0;

 protected:
  ~AnswersSubgroups() = default;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_SUBGROUP_ANSWERS_H_
