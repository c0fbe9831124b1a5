// When the units of one step were gathered and reduced, and what of that its
// computation has covered.
//
// Values only: ShardedModel::timeline() fills them in.
//
//   std::cout << describe(sharded->timeline());
//
// All times are nanoseconds of the steady clock, 0 for what did not happen.
// Launches and completions on devices with streams are stamped when the
// device's stream passed them, all others when the host did.
//
// Thread safety: pure functions.

#ifndef BRIGADE_FSDP_SHARDING_TIMELINE_H_
#define BRIGADE_FSDP_SHARDING_TIMELINE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace brigade {

// What a unit is gathered for; kOther: beside forward and backward.
enum class GatheredIn { kForward, kBackward, kOther };

struct GatherTimes {
  std::string unit = {};
  GatheredIn pass = GatheredIn::kOther;
  int64_t launch_ns = 0;
  int64_t complete_ns = 0;
  int64_t needed_ns = 0;  // first; 0: this rank did not need it
  int64_t whole_ns = 0;   // the host went on

  int64_t travel_ns() const;
  // Of that, what the host waited for; on devices it does not wait.
  int64_t exposed_ns() const;
};

struct ReductionTimes {
  std::string unit = {};
  int64_t launch_ns = 0;
  int64_t complete_ns = 0;

  int64_t travel_ns() const;
};

// Of a step: from the first forward behind a reduced backward to the end of the
// next one.
struct ShardingTimeline {
  int64_t iteration = 0;  // of reduced backwards; 0: none has been sampled
  int64_t forward_begin_ns = 0;
  int64_t forward_end_ns = 0;  // of the last one
  int64_t backward_begin_ns = 0;
  int64_t backward_end_ns = 0;                  // all gradients are there
  int64_t finalize_end_ns = 0;                  // and all sums
  std::vector<GatherTimes> gathers = {};        // in launch order
  std::vector<ReductionTimes> reductions = {};  // in launch order

  // Of the reduction, what comes behind backward, and no earlier one covers.
  int64_t exposed_ns(size_t reduction) const;
};

// A table for people: one line per gather and reduction, in ms from the begin
// of forward.
std::string describe(const ShardingTimeline& timeline);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDING_TIMELINE_H_
