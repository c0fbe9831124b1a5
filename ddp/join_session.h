// The ranks that still have inputs, counted once per iteration of join() by an
// all-reduce of 4 bytes per rank.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_JOIN_SESSION_H_
#define BRIGADE_DDP_JOIN_SESSION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/ddp/data_parallel_options.h"

namespace brigade {

class JoinSession {
 public:
  JoinSession(c10::intrusive_ptr<c10d::ProcessGroup> group,
              JoinOptions options);

  // This rank has an input. Does not wait unless training ends early.
  // Collective. Errors: RuntimeError naming the ranks that have run out, if
  // training ends early.
  void begin_iteration();

  // This rank has run out. True if another one has data: then its iteration is
  // to be shadowed. Collective. Errors: as begin_iteration().
  bool begin_shadow();

  // Of this iteration. The first call waits for the count.
  int num_ranks_with_data();
  int first_rank_with_data();

  // The lowest of those that had data in the last iteration that anybody had
  // data in; -1 if there was none.
  int last_rank_with_data();

  const JoinOptions& options() const { return options_; }

 private:
  struct Count {
    at::Tensor counts;  // int32, [world_size], on the group's device
    c10::intrusive_ptr<c10d::Work> work = nullptr;
  };

  void count(bool has_data);
  std::vector<int> read(const Count& count) const;
  void wait_for_count();
  void end_early_if_uneven();

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const JoinOptions options_;
  int64_t iteration_ = 0;
  Count current_;
  Count previous_;
  bool is_read_ = false;        // what follows is of current_
  std::vector<int> with_data_;  // ranks, ascending
  int last_rank_with_data_ = -1;
};

}  // namespace brigade

#endif  // BRIGADE_DDP_JOIN_SESSION_H_
