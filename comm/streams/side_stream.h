// Streams beside those that a program computes on.

#ifndef BRIGADE_COMM_STREAMS_SIDE_STREAM_H_
#define BRIGADE_COMM_STREAMS_SIDE_STREAM_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace brigade {

// One that the process has for such purposes; the little that runs there holds
// up a collective, so that it goes first. REQUIRES: a device with streams.
c10::Stream side_stream(c10::Device device);

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_SIDE_STREAM_H_
