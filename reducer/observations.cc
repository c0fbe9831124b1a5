#include "brigade/reducer/observations.h"

#include <utility>

namespace brigade {

void Observations::bind(std::vector<c10::Device> devices,
                        size_t num_variables) {
  names = RangeNames(devices.size());
  progress->num_units.store(static_cast<int64_t>(devices.size()),
                            std::memory_order_relaxed);
  timeline.bind(std::move(devices), num_variables);
}

void Observations::watch_stalls(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& store_prefix, StallWatch::Names stall_names,
    std::function<std::string()> describe_progress) {
  stall_watch = StallWatch::start(group, store_prefix, std::move(stall_names),
                                  progress, std::move(describe_progress));
  if (!stall_watch) return;
  if (stall_report_after) stall_watch->set_report_after(*stall_report_after);
  stall_watch->set_handler(std::exchange(stall_handler, nullptr));
}

void Observations::iteration_begins(int64_t iteration) {
  timeline.restart();
  progress->iteration.store(iteration, std::memory_order_relaxed);
  progress->launched.store(0, std::memory_order_relaxed);
}

void Observations::launched(const Launch& launch) {
  const std::optional<size_t> unit = launch.collective->unit();
  if (!unit) return;
  if (launch.future) timeline.launched(*unit, *launch.future);
  progress->launched.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace brigade
