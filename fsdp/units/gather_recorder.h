// Writes down when units were gathered, in steps that are sampled.
//
// Sampled as the engine's timeline is (engine/observing/timeline_recorder.h).
// In other steps each call is one branch; in a sampled one a gather costs one
// allocation and a callback of its future.
//
// Thread safety: one call at a time. Callbacks of futures write into states of
// their own, which outlive this object.

#ifndef BRIGADE_FSDP_UNITS_GATHER_RECORDER_H_
#define BRIGADE_FSDP_UNITS_GATHER_RECORDER_H_

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "brigade/engine/observing/timeline_recorder.h"
#include "brigade/fsdp/schedule/memory_uses.h"
#include "brigade/fsdp/schedule/sharding_timeline.h"

namespace brigade {

class GatherRecorder {
 public:
  explicit GatherRecorder(c10::Device device) : device_(device) {}

  void set_sample_rate(int64_t sample_rate) { sample_rate_ = sample_rate; }

  // A forward begins of the step that leads to this iteration; the first one of
  // a step, or another.
  void forward_begins(int64_t iteration);
  void forward_ends() {
    if (is_sampling_) stamp_forward_end();
  }

  // The step's reduced backward is this iteration, which is a later one than
  // was expected where ranks have failed.
  void backward_begins(int64_t iteration) { current_.iteration = iteration; }

  bool is_sampling() const { return is_sampling_; }

  // A unit's gather is being launched, on the gathers' stream; it has been, of
  // one segment, as this future.
  void launch_begins(size_t unit, GatheredIn pass) {
    if (is_sampling_) add(unit, pass);
  }
  void launched(c10::ivalue::Future& future) {
    if (is_sampling_) watch(future);
  }

  // The host needs what the pass has gathered last of the unit, and has waited
  // for it.
  void needed(size_t unit) {
    if (is_sampling_) stamp_needed(unit);
  }
  void is_whole(size_t unit) {
    if (is_sampling_) stamp_whole(unit);
  }

  // The step has ended well, with reductions of these units, in launch order,
  // or is dropped.
  void end(const std::vector<size_t>& reduced) {
    if (is_sampling_) finish(reduced);
  }
  void drop() { is_sampling_ = false; }

  // Fills in what is known here of the last sampled step, if it was that of
  // `timeline`: its forward, gathers, and names of units, from `names`. On
  // devices, waits for the gathers.
  void fill_in(ShardingTimeline& timeline,
               const std::vector<std::string>& names) const;

 private:
  struct Arrival;
  struct Gather {
    size_t unit;
    GatheredIn pass;
    int64_t launch_ns = 0;
    int64_t needed_ns = 0;
    int64_t whole_ns = 0;
    std::vector<std::shared_ptr<Arrival>> arrivals = {};  // by segment
  };
  struct Step {
    int64_t iteration = 0;
    int64_t forward_begin_ns = 0;
    int64_t forward_end_ns = 0;
    std::vector<Gather> gathers = {};
    std::vector<size_t> reduced = {};
  };

  void stamp_forward_end();
  void add(size_t unit, GatheredIn pass);
  void watch(c10::ivalue::Future& future);
  void stamp_needed(size_t unit);
  void stamp_whole(size_t unit);
  void finish(const std::vector<size_t>& reduced);
  Gather* last_of(size_t unit);

  const c10::Device device_;
  int64_t sample_rate_ = TimelineRecorder::kDefaultSampleRate;
  bool is_sampling_ = false;
  Step current_;
  Step last_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNITS_GATHER_RECORDER_H_
