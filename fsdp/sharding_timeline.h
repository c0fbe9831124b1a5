// When the units of a step were gathered and reduced, and how much of that the
// computation covered.
//
//   std::cout << describe(sharded->timeline());
//
// All times are nanoseconds of the steady clock, 0 for what did not happen.
// Launches and completions on devices with streams are stamped when the
// device's stream passed them, all others when the host did.

#ifndef BRIGADE_FSDP_SHARDING_TIMELINE_H_
#define BRIGADE_FSDP_SHARDING_TIMELINE_H_

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "brigade/observing/timeline_recorder.h"

namespace brigade {

// Why a unit is gathered; kOther: neither for forward nor for backward.
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

// A step: from the first forward after a reduced backward to the end of the
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

  // The part of the reduction after backward that no earlier one covers.
  int64_t exposed_ns(size_t reduction) const;
};

// A table for people: one line per gather and reduction, in ms from the begin
// of forward.
std::string describe(const ShardingTimeline& timeline);

// Records the timelines of sampled steps: the first ten and every n-th
// (observing/timeline_recorder.h). In other steps each call is one branch. In a
// sampled one a collective costs one allocation and a callback of its future.
//
// Thread safety: one call at a time. Callbacks of futures write into states of
// their own, which outlive this object.
class ShardingRecorder {
 public:
  explicit ShardingRecorder(c10::Device device) : device_(device) {}

  // 0: no steps. Throws ValueError for a negative rate.
  void set_sample_rate(int64_t sample_rate);

  // A step is from the first forward after a reduced backward to the end of the
  // next one.
  void forward_begins();
  void forward_ends() { stamp(current_.times.forward_end_ns); }
  void backward_begins();
  void backward_ends() { stamp(current_.times.backward_end_ns); }
  // All sums are there.
  void step_ends();
  void step_fails();

  // On the stream of the collectives, before and after.
  void gather_begins(size_t unit) {
    if (is_sampling_) add(current_.gathers, unit);
  }
  void gather_launched(c10::ivalue::Future& future) {
    if (is_sampling_) watch(current_.gathers.back(), future);
  }
  void reduction_begins(size_t unit) {
    if (is_sampling_) add(current_.reductions, unit);
  }
  void reduction_launched(c10::ivalue::Future& future) {
    if (is_sampling_) watch(current_.reductions.back(), future);
  }
  // The host needs the unit, and has waited for it.
  void needed(size_t unit) {
    if (is_sampling_) stamp_needed(unit);
  }
  void unsharded(size_t unit) {
    if (is_sampling_) stamp_unsharded(unit);
  }

  // The last sampled step; `names`: of units. On devices, waits for it.
  ShardingTimeline timeline(const std::vector<std::string>& names) const;

 private:
  struct Arrival;
  struct Launch {
    size_t unit;
    GatherTimes times;
    std::vector<std::shared_ptr<Arrival>> arrivals = {};  // by flat
  };
  struct Step {
    ShardingTimeline times = {};
    std::vector<Launch> gathers = {};
    std::vector<Launch> reductions = {};
  };

  void stamp(int64_t& time_ns) const;
  void add(std::vector<Launch>& launches, size_t unit);
  void watch(Launch& launch, c10::ivalue::Future& future);
  void stamp_needed(size_t unit);
  void stamp_unsharded(size_t unit);
  Launch* last_gather_of(size_t unit);
  GatherTimes times_of(const Launch& launch) const;

  const c10::Device device_;
  int64_t sample_rate_ = TimelineRecorder::kDefaultSampleRate;
  int64_t num_steps_ = 0;  // that have ended
  bool is_in_step_ = false;
  bool is_sampling_ = false;
  GatheredIn pass_ = GatheredIn::kOther;
  Step current_;
  Step last_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDING_TIMELINE_H_
