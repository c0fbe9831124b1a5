// Timelines of sampled steps of a sharded model.

#ifndef BRIGADE_FSDP_SHARDING_RECORDER_H_
#define BRIGADE_FSDP_SHARDING_RECORDER_H_

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "brigade/observing/timeline.h"
#include "brigade/observing/timeline_recorder.h"

namespace brigade {

// Records the first ten steps and every n-th (observing/timeline_recorder.h).
// In other steps each call is one branch. In a sampled one a collective costs
// one allocation and a callback of its future.
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
  void step_fails() { is_in_step_ = is_sampling_ = false; }

  // A collective of a unit: on its stream, before it and after each launch.
  enum Collective { kGather, kReduction };
  void begins(Collective collective, size_t unit);
  void launched(Collective collective, c10::ivalue::Future& future);
  // The host needs the unit, and has waited for it.
  void needed(size_t unit);
  void unsharded(size_t unit);

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
    std::array<std::vector<Launch>, 2> launches = {};  // by Collective
  };

  void stamp(int64_t& time_ns) const;
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

#endif  // BRIGADE_FSDP_SHARDING_RECORDER_H_
