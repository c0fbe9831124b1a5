#include "brigade/reducer/last_error.h"

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "brigade/reducer/steady_time.h"

namespace brigade {
namespace {

std::string text_of_current_exception() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of an unknown type";
  }
}

}  // namespace

void LastError::note(int64_t iteration) {
  // May take locks of other languages, so not under ours.
  std::string text = text_of_current_exception();
  const std::lock_guard<std::mutex> lock(mutex_);
  error_ = {
      .time_ns = now_ns(), .iteration = iteration, .text = std::move(text)};
}

std::optional<ReducerError> LastError::get() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

}  // namespace brigade
