// The ranks that still have inputs, counted once per iteration of join() by an
// all-reduce of 4 bytes per rank.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_JOIN_SESSION_H_
#define BRIGADE_DDP_JOIN_SESSION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace brigade {

class JoinSession {
 public:
  explicit JoinSession(c10::intrusive_ptr<c10d::ProcessGroup> group)
      : group_(std::move(group)) {}

  // This rank has an input. Does not wait. Collective.
  void begin_iteration() { count(/*has_data=*/true); }

  // This rank has run out. True if another one has data: then its iteration is
  // to be shadowed. Collective. Errors: PeerError.
  bool begin_shadow();

  // Of this iteration. The first call waits for the count.
  int num_ranks_with_data();
  int first_rank_with_data();

  // The lowest of those that had data in the last iteration that anybody had
  // data in; -1 if there was none.
  int last_rank_with_data();

 private:
  struct Count {
    at::Tensor counts;  // int32, [world_size], on the group's device
    c10::intrusive_ptr<c10d::Work> work = nullptr;
  };

  void count(bool has_data);
  std::vector<int> read(const Count& count) const;
  void wait_for_count();

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int64_t iteration_ = 0;
  Count current_;
  Count previous_;
  bool is_read_ = false;        // what follows is of current_
  std::vector<int> with_data_;  // ranks, ascending
  int last_rank_with_data_ = -1;
};

}  // namespace brigade

#endif  // BRIGADE_DDP_JOIN_SESSION_H_
