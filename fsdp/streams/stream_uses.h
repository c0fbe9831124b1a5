// The streams that use some memory, or have written parts of it. On the CPU
// there are none.
//
// Thread safety: none.

#ifndef BRIGADE_FSDP_STREAMS_STREAM_USES_H_
#define BRIGADE_FSDP_STREAMS_STREAM_USES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <vector>

#include "brigade/fsdp/streams/stream_point.h"

namespace brigade {

class StreamUses {
 public:
  explicit StreamUses(c10::Device device) : device_(device) {}

  // The calling thread's current stream is one of them. Returns whether it is a
  // new one.
  bool note();
  // The same of any stream of the device.
  bool note(const c10::Stream& stream);

  bool empty() const { return streams_.empty(); }
  bool has_current() const;

  // The calling thread's current stream is behind what the others have been
  // given so far.
  void join() const;

  // Of all of them, each with what it has been given so far. None is left.
  StreamPoint end();
  void forget() { streams_.clear(); }

  // A caching allocator is told of all of them: `memory` may be dropped.
  void record_on(const at::Tensor& memory) const;

 private:
  const c10::Device device_;
  std::vector<c10::Stream> streams_;  // distinct
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_STREAMS_STREAM_USES_H_
