// Remembers what went wrong last, for those who ask later.
//
// Thread safety: all methods may be called from any thread.

#ifndef BRIGADE_REDUCER_LAST_ERROR_H_
#define BRIGADE_REDUCER_LAST_ERROR_H_

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace brigade {

struct ReductionError {
  int64_t time_ns = 0;    // steady clock
  int64_t iteration = 0;  // the last that was prepared
  std::string text = {};  // without a backtrace
};

class LastError {
 public:
  // To be called in a catch block: takes the exception that is handled there.
  // Does not throw.
  void note(int64_t iteration);

  std::optional<ReductionError> get() const;

 private:
  mutable std::mutex mutex_;
  std::optional<ReductionError> error_;  // guarded by mutex_
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_LAST_ERROR_H_
