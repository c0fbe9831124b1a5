// Records when units were gathered and reduced, in steps that are sampled: the
// first ten and every n-th (observing/timeline_recorder.h).
//
// In other steps each call is one branch. In a sampled one a collective costs
// one allocation and a callback of its future.
//
// Thread safety: one call at a time. Callbacks of futures write into states of
// their own, which outlive this object.

#ifndef BRIGADE_FSDP_SHARDING_RECORDER_H_
#define BRIGADE_FSDP_SHARDING_RECORDER_H_

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "brigade/fsdp/sharding_timeline.h"
#include "brigade/observing/timeline_recorder.h"

namespace brigade {

class ShardingRecorder {
 public:
  explicit ShardingRecorder(c10::Device device) : device_(device) {}

  // 0: no steps. Throws ValueError for a negative rate.
  void set_sample_rate(int64_t sample_rate);

  // A step is from the first forward after a reduced backward to the end of the
  // next one.
  void forward_begins();
  void forward_ends() {
    if (is_sampling_) stamp(current_.forward_end_ns);
  }
  void backward_begins();
  void backward_ends() {
    if (is_sampling_) stamp(current_.backward_end_ns);
  }
  // All sums are there.
  void step_ends();
  void step_fails();

  // On the stream of the collectives, before and after.
  void gather_begins(size_t unit) {
    if (is_sampling_) add(gathers_, unit);
  }
  void gather_launched(c10::ivalue::Future& future) {
    if (is_sampling_) watch(gathers_.back(), future);
  }
  void reduction_begins(size_t unit) {
    if (is_sampling_) add(reductions_, unit);
  }
  void reduction_launched(c10::ivalue::Future& future) {
    if (is_sampling_) watch(reductions_.back(), future);
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
    GatheredIn pass;
    int64_t launch_ns = 0;
    int64_t needed_ns = 0;
    int64_t whole_ns = 0;
    std::vector<std::shared_ptr<Arrival>> arrivals = {};  // by flat
  };

  static void stamp(int64_t& time_ns);
  void add(std::vector<Launch>& launches, size_t unit);
  void watch(Launch& launch, c10::ivalue::Future& future);
  void stamp_needed(size_t unit);
  void stamp_unsharded(size_t unit);
  Launch* last_gather_of(size_t unit);
  int64_t resolve(const Launch& launch, int64_t& launch_ns) const;

  const c10::Device device_;
  int64_t sample_rate_ = TimelineRecorder::kDefaultSampleRate;
  int64_t num_steps_ = 0;  // that have ended
  bool is_in_step_ = false;
  bool is_sampling_ = false;
  GatheredIn pass_ = GatheredIn::kOther;
  ShardingTimeline current_;
  std::vector<Launch> gathers_;
  std::vector<Launch> reductions_;
  ShardingTimeline last_;
  std::vector<Launch> last_gathers_;
  std::vector<Launch> last_reductions_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDING_RECORDER_H_
