#include "brigade/reducer/observations.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/observing/timeline_recorder.h"

namespace brigade {

ProfilerRange::ProfilerRange(const std::string& name, at::RecordScope scope) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(scope);
  if (!callbacks) return;
  function_.emplace(*std::move(callbacks));
  function_->before(name, c10::ArrayRef<const c10::IValue>());
}

void Observations::bind(std::vector<c10::Device> devices,
                        size_t num_variables) {
  pack_names.clear();
  launch_names.clear();
  for (size_t b = 0; b < devices.size(); ++b) {
    const std::string bucket =
        absl::StrCat("brigade: bucket ", b, " of ", devices.size());
    pack_names.push_back(absl::StrCat(bucket, " pack"));
    launch_names.push_back(absl::StrCat(bucket, " launch"));
  }
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

void Observations::launched(size_t unit, c10::ivalue::Future* future) {
  if (future != nullptr) timeline.launched(unit, *future);
  progress->launched.fetch_add(1, std::memory_order_relaxed);
}

void Observations::note_error() {
  // May take locks of other languages, so not under ours.
  std::string text = message_of(std::current_exception());
  const std::lock_guard<std::mutex> lock(error_mutex_);
  last_error_ = {.time_ns = now_ns(),
                 .iteration = progress->iteration,
                 .text = std::move(text)};
}

std::optional<ReductionError> Observations::last_error() const {
  const std::lock_guard<std::mutex> lock(error_mutex_);
  return last_error_;
}

}  // namespace brigade
