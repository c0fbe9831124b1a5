// Which comm hooks let ranks of one host meet in memory that they share
// (comm/ordered/host_sums.h), in place of their group's all-reduce.

#ifndef BRIGADE_COMM_HOOKS_TAKES_HOST_SUMS_H_
#define BRIGADE_COMM_HOOKS_TAKES_HOST_SUMS_H_

#include <memory>

namespace brigade {

class HostSums;

class TakesHostSums {
 public:
  // Whether it takes them, or a hook that it calls does. Does not change.
  virtual bool takes_host_sums() const = 0;

  // Those of the hook's group. On all ranks, before a bucket travels.
  // REQUIRES: takes_host_sums().
  virtual void take_host_sums(std::shared_ptr<HostSums> sums) = 0;

 protected:
  ~TakesHostSums() = default;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_TAKES_HOST_SUMS_H_
