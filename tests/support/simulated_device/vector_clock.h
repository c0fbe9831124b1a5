// How much of each stream's work lies behind a point: of a stream, of an event,
// or of a host.
//
// Thread safety: none.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_VECTOR_CLOCK_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_VECTOR_CLOCK_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace brigade::simulated {

class VectorClock {
 public:
  // How many operations of this stream lie behind.
  uint64_t at(size_t stream) const {
    return stream < counts_.size() ? counts_[stream] : 0;
  }

  // One more operation of this stream.
  void tick(size_t stream) {
    counts_.resize(std::max(counts_.size(), stream + 1));
    ++counts_[stream];
  }

  // What lies behind the other point lies behind this one too.
  void join(const VectorClock& other) {
    counts_.resize(std::max(counts_.size(), other.counts_.size()));
    for (size_t s = 0; s < other.counts_.size(); ++s) {
      counts_[s] = std::max(counts_[s], other.counts_[s]);
    }
  }

  bool covers(const VectorClock& other) const {
    for (size_t s = 0; s < other.counts_.size(); ++s) {
      if (other.counts_[s] > at(s)) return false;
    }
    return true;
  }

 private:
  std::vector<uint64_t> counts_;  // by stream
};

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_VECTOR_CLOCK_H_
