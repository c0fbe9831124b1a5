#include "brigade/fsdp/streams/sharding_streams.h"

#include "brigade/comm/streams/side_stream.h"

namespace brigade {

std::optional<c10::Stream> stream_beside_the_program(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return side_stream(device);
}

ShardingStreams::ShardingStreams(c10::Device device)
    : device_(device),
      gathers_(stream_beside_the_program(device)),
      sums_(stream_beside_the_program(device)) {}

}  // namespace brigade
