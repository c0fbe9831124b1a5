// Tells whether collectives are launched on threads of a backend: by
// continuations, that is, which run as other collectives complete, in another
// order on each rank.
//
// Watches all operations of the process by a callback of the dispatcher's,
// which costs each some 100 ns while it watches: for the first iterations of a
// hook, not for all.
//
// Thread safety: made and destroyed by one thread.

#ifndef BRIGADE_COMM_HOOKS_CONTINUATION_WATCH_H_
#define BRIGADE_COMM_HOOKS_CONTINUATION_WATCH_H_

#include <ATen/record_function.h>

namespace brigade {

class ContinuationWatch {
 public:
  ContinuationWatch();
  ~ContinuationWatch();
  ContinuationWatch(const ContinuationWatch&) = delete;
  ContinuationWatch& operator=(const ContinuationWatch&) = delete;

  // Of the process, since this was made: on Gloo's threads.
  bool has_seen_any() const;

 private:
  const int64_t seen_before_;
  const at::CallbackHandle handle_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_CONTINUATION_WATCH_H_
