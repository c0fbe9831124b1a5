// What can be observed of when units are gathered and reduced.

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "brigade/fsdp/sharded_root.h"

namespace brigade {

void ShardedRoot::note_step_begins() {
  engine_->forward_begins();
  gathers_->recorder().forward_begins(engine_->statistics().begun + 1);
}

void ShardedRoot::note_reduced_backward() {
  GatherRecorder& recorder = gathers_->recorder();
  if (!recorder.is_sampling()) return;
  recorder.backward_begins(engine_->statistics().begun);
}

ShardingTimeline ShardedRoot::timeline() const {
  const Timeline of_engine = engine_->timeline();
  ShardingTimeline timeline = {.iteration = of_engine.iteration,
                               .backward_begin_ns = of_engine.backward_begin_ns,
                               .backward_end_ns = of_engine.backward_end_ns,
                               .finalize_end_ns = of_engine.finalize_end_ns};
  for (const UnitTimes& unit : of_engine.units) {
    timeline.reductions.push_back(
        {.launch_ns = unit.launch_ns, .complete_ns = unit.complete_ns});
  }
  std::vector<std::string> names;
  for (const Unit& unit : units_) names.push_back(unit.name);
  gathers_->recorder().fill_in(timeline, names);
  return timeline;
}

void ShardedRoot::set_timeline_sample_rate(int64_t sample_rate) {
  engine_->set_timeline_sample_rate(sample_rate);
  gathers_->recorder().set_sample_rate(sample_rate);
}

}  // namespace brigade
