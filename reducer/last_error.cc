#include "brigade/reducer/last_error.h"

#include <exception>
#include <utility>

#include "brigade/comm/errors/error_texts.h"
#include "brigade/observing/timeline_recorder.h"

namespace brigade {

void LastError::note(int64_t iteration) {
  // May take locks of other languages, so not under ours.
  std::string text = message_of(std::current_exception());
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = {
      .time_ns = now_ns(), .iteration = iteration, .text = std::move(text)};
}

std::optional<ReductionError> LastError::get() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

}  // namespace brigade
