// Keeps a peer that has closed its connection from ending this process.
//
// Gloo writes to sockets without a thought for SIGPIPE, whose default is to end
// the process.  Python ignores the signal, a C++ program does not, and a
// library has no business to change that for all of it.  Threads inherit the
// mask of their maker: those that are made while this is held get the error,
// and never the signal.  Neither does the calling thread: what its own writes
// have raised is taken away at the end.
//
// Thread safety: concerns the calling thread only.

#ifndef BRIGADE_COMM_BACKENDS_SIGPIPE_BLOCK_H_
#define BRIGADE_COMM_BACKENDS_SIGPIPE_BLOCK_H_

#include <pthread.h>
#include <signal.h>
#include <time.h>

namespace brigade {

class SigpipeBlock {
 public:
  SigpipeBlock() {
    sigset_t sigpipe;
    sigemptyset(&sigpipe);
    sigaddset(&sigpipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe, &before_);
    was_pending_ = is_pending();
  }
  ~SigpipeBlock() {
    if (!was_pending_ && is_pending()) {
      sigset_t sigpipe;
      sigemptyset(&sigpipe);
      sigaddset(&sigpipe, SIGPIPE);
      const timespec at_once = {};
      sigtimedwait(&sigpipe, nullptr, &at_once);
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SigpipeBlock(const SigpipeBlock&) = delete;
  SigpipeBlock& operator=(const SigpipeBlock&) = delete;

 private:
  static bool is_pending() {
    sigset_t pending;
    sigpending(&pending);
    return sigismember(&pending, SIGPIPE) == 1;
  }

  sigset_t before_;
  bool was_pending_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_SIGPIPE_BLOCK_H_
