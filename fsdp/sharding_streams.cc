#include "brigade/fsdp/sharding_streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace brigade {

// The little that runs there (casts, zeros) holds up a collective: it goes
// first.
std::optional<c10::Stream> stream_beside_the_program(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

ShardingStreams::ShardingStreams(c10::Device device)
    : device_(device),
      gathers_(stream_beside_the_program(device)),
      sums_(stream_beside_the_program(device)) {}

}  // namespace brigade
