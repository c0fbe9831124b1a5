// Which iterations have been reduced, and which backward runs through one of
// them again.
//
// The outputs of a forward pass report here when a backward reaches them. This
// object outlives the iterations; the outputs hold it weakly, so they may
// outlive the reducer.
//
// Thread safety: all methods may be called on any thread.

#ifndef BRIGADE_REDUCER_REDUCED_ITERATIONS_H_
#define BRIGADE_REDUCER_REDUCED_ITERATIONS_H_

#include <atomic>
#include <cstdint>

namespace brigade {

class ReducedIterations {
 public:
  void mark_reduced(int64_t iteration) { last_ = iteration; }

  int64_t last() const { return last_; }  // 0: none yet

  // The backward `backward_id` goes through an output of `iteration`.
  void output_reached(int64_t iteration, int backward_id) {
    if (iteration <= last_) stale_backward_id_ = backward_id;
  }

  // True if this backward goes through outputs of an iteration that is over.
  bool is_stale(int backward_id) const {
    return stale_backward_id_ == backward_id && backward_id >= 0;
  }

 private:
  std::atomic<int64_t> last_ = 0;
  std::atomic<int> stale_backward_id_ = -1;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_REDUCED_ITERATIONS_H_
