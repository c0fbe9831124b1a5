// Recorder of timelines (timeline.h).

#ifndef BRIGADE_OBSERVING_TIMELINE_RECORDER_H_
#define BRIGADE_OBSERVING_TIMELINE_RECORDER_H_

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "brigade/observing/timeline.h"

namespace brigade {

// The clock of timelines.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Events recorded on a device's streams for the steps of an iteration and of
// its units. Only resolve() waits for them.
//
// Thread safety: any thread.
class DeviceTimes {
 public:
  enum Step { kPackBegin, kPackEnd, kLaunch, kComplete };
  enum Mark { kForwardEnd, kBackwardBegin, kBackwardEnd };

  explicit DeviceTimes(size_t num_units) : by_unit_(num_units) {}

  // Records an event on this thread's current stream of `device`. Does nothing
  // for the CPU, or if the device reports an error.
  void record(size_t unit, Step step, c10::Device device) noexcept {
    record(by_unit_[unit][step], device);
  }
  void record(Mark mark, c10::Device device) noexcept {
    record(marks_[mark], device);
  }

  // Waits for the events, and replaces the host's times of these steps by the
  // device's, mapped to the steady clock.
  void resolve(Timeline& timeline) const;

 private:
  using Event = std::optional<c10::Event>;
  using Events = std::array<Event, 4>;

  void record(Event& event, c10::Device device) noexcept;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<Events> by_unit_;  // indexed by Step
  std::array<Event, 3> marks_;   // indexed by Mark
};

struct Completions;

// Records the first ten iterations and every n-th later one. In other
// iterations each call costs one branch.
//
// Thread safety: none; guarded by the engine's lock. Callbacks of futures write
// into separate state, which may outlive this object.
class TimelineRecorder {
 public:
  static bool is_sampled(int64_t iteration, int64_t sample_rate) {
    return sample_rate > 0 &&
           (iteration <= kAlwaysSampled || iteration % sample_rate == 0);
  }

  // 0: samples no iteration. REQUIRES: not negative.
  // Returns the previous rate.
  int64_t set_sample_rate(int64_t sample_rate) {
    return std::exchange(sample_rate_, sample_rate);
  }

  // `devices`: the device of each unit, in launch order.
  void bind(std::vector<c10::Device> devices, size_t num_variables);

  void forward_begins(int64_t iteration);

  // Stops recording until the next prepared().
  void restart() { sampling_ = false; }

  // Call when Engine::prepare() of `iteration` returns.
  void prepared(int64_t iteration);

  void backward_begins() {
    if (sampling_ && current_.backward_begin_ns == 0) stamp_backward();
  }
  void gradient_ready(VariableIndex variable) {
    if (!sampling_) return;
    current_.gradients.push_back({.variable = variable, .ready_ns = now_ns()});
  }
  void pack_begins(size_t unit) { stamp(unit, DeviceTimes::kPackBegin); }
  void pack_ends(size_t unit) { stamp(unit, DeviceTimes::kPackEnd); }
  void launch_begins(size_t unit, int64_t bytes) {
    stamp(unit, DeviceTimes::kLaunch);
    if (sampling_) current_.units[unit].bytes = bytes;
  }
  void launched(size_t unit, c10::ivalue::Future& future);
  // Call after a wait for the future, whose callback may run later.
  void waited_for(size_t unit);
  void backward_ends();
  void finalized();

  // Returns the last complete sampled iteration. Waits for the device if units
  // are on devices with streams.
  Timeline last() const;

 private:
  void stamp_backward();
  void stamp(size_t unit, DeviceTimes::Step step);
  void mark(DeviceTimes::Mark mark);

  int64_t sample_rate_ = kDefaultSampleRate;
  bool sampling_ = false;
  int64_t forward_begin_ns_ = 0;  // of the next iteration
  size_t num_variables_ = 0;
  std::vector<c10::Device> devices_;
  Timeline current_;
  Timeline last_;
  std::shared_ptr<Completions> current_completions_;
  std::shared_ptr<Completions> last_completions_;
};

// Recorder of the timelines of a sharded model's steps, sampled as by
// TimelineRecorder. In other steps each call costs one branch; in a sampled
// step a collective allocates its times and gets a callback of its future.
//
// Thread safety: one call at a time. Callbacks write into separate state, which
// may outlive this object.
class ShardingRecorder {
 public:
  explicit ShardingRecorder(c10::Device device) : device_(device) {}

  // 0: samples no step. Throws ValueError for a negative rate.
  void set_sample_rate(int64_t sample_rate);

  // A step ends with a reduced backward.
  void forward_begins();
  void forward_ends() { stamp(current_.times.forward_end_ns); }
  void backward_begins();
  void backward_ends() { stamp(current_.times.backward_end_ns); }
  // Call when all reductions are complete.
  void step_ends();
  void step_fails() { is_in_step_ = is_sampling_ = false; }

  // A unit's collective has a launch for each flat shard. Call launch_begins()
  // before the first and launched() after each, on the collective's stream.
  // `bytes`: of the unit's unsharded parameters or gradients.
  enum Collective { kAllGather, kReduceScatter };
  void launch_begins(Collective collective, size_t unit, int64_t bytes);
  void launched(Collective collective, c10::ivalue::Future& future);
  // The host begins and ends a wait for the unit's all-gather.
  void needed(size_t unit);
  void unsharded(size_t unit);

  // Returns the last complete sampled step; waits for devices. `names`: by
  // unit.
  ShardingTimeline timeline(const std::vector<std::string>& names) const;

 private:
  struct Launch {
    size_t unit;
    GatherTimes times;
    // By flat shard.
    std::vector<std::shared_ptr<Completions>> completions = {};
  };
  struct Step {
    ShardingTimeline times = {};
    std::array<std::vector<Launch>, 2> launches = {};  // by Collective
  };

  void stamp(int64_t& time_ns) const;
  static void complete_all(std::span<const Launch> launches);
  Launch* last_gather_of(size_t unit);
  GatherTimes times_of(const Launch& launch) const;

  const c10::Device device_;
  int64_t sample_rate_ = kDefaultSampleRate;
  int64_t num_steps_ = 0;  // complete ones
  bool is_in_step_ = false;
  bool is_sampling_ = false;
  GatheredIn pass_ = GatheredIn::kOther;
  Step current_;
  Step last_;
};

}  // namespace brigade

#endif  // BRIGADE_OBSERVING_TIMELINE_RECORDER_H_
