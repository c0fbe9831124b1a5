// Writes the timelines of sampled iterations.
//
// The first ten iterations are sampled, and every n-th after them. In the
// others each call is one branch. What a sampled iteration needs is allocated
// when units are bound; a unit's future keeps a callback on top of that.
//
// Thread safety: none; the engine's lock covers it. Callbacks of futures write
// into a state of their own, which outlives this object.

#ifndef BRIGADE_OBSERVING_TIMELINE_RECORDER_H_
#define BRIGADE_OBSERVING_TIMELINE_RECORDER_H_

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "brigade/observing/device_times.h"
#include "brigade/observing/timeline.h"

namespace brigade {

class TimelineRecorder {
 public:
  // Sampled whatever the rate is. Source of both: torch's DDP logging.
  static constexpr int64_t kAlwaysSampled = 10;
  static constexpr int64_t kDefaultSampleRate = 100;

  static bool is_sampled(int64_t iteration, int64_t sample_rate);

  // Every `sample_rate`-th iteration; 0: none at all. REQUIRES: not negative.
  void set_sample_rate(int64_t sample_rate) { sample_rate_ = sample_rate; }

  // `devices`: of each unit, in launch order.
  void bind(std::vector<c10::Device> devices, size_t num_variables);

  // The forward of `iteration` begins.
  void forward_begins(int64_t iteration);

  // Another iteration begins, of which nothing is recorded unless prepared()
  // follows.
  void restart() { sampling_ = false; }

  // Engine::prepare() of `iteration` returns.
  void prepared(int64_t iteration);

  void backward_begins() {
    if (sampling_ && current_.backward_begin_ns == 0) stamp_backward();
  }
  void gradient_ready(VariableIndex variable) {
    if (sampling_) stamp_gradient(variable);
  }
  void pack_begins(size_t unit) {
    if (sampling_) stamp_pack_begin(unit);
  }
  void pack_ends(size_t unit) {
    if (sampling_) stamp_pack_end(unit);
  }
  void launch_begins(size_t unit) {
    if (sampling_) stamp_launch(unit);
  }
  // `future` is the one of the launch.
  void launched(size_t unit, c10::ivalue::Future& future) {
    if (sampling_) watch(unit, future);
  }
  // The future has been waited for. Its callback may come a little later.
  void waited_for(size_t unit) {
    if (sampling_) stamp_complete(unit);
  }
  void backward_ends() {
    if (sampling_) stamp_backward_end();
  }
  void finalized() {
    if (sampling_) finish();
  }

  // The last sampled iteration that was reduced to the end. With units on
  // devices with streams, waits for these.
  Timeline last() const;

 private:
  struct Completions;

  bool is_sampled(int64_t iteration) const {
    return is_sampled(iteration, sample_rate_);
  }
  void stamp_backward();
  void mark(DeviceTimes::Mark mark);
  void stamp_gradient(VariableIndex variable);
  void stamp_pack_begin(size_t unit);
  void stamp_pack_end(size_t unit);
  void stamp_launch(size_t unit);
  void stamp_complete(size_t unit);
  void stamp_backward_end();
  void watch(size_t unit, c10::ivalue::Future& future);
  void finish();

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

}  // namespace brigade

#endif  // BRIGADE_OBSERVING_TIMELINE_RECORDER_H_
