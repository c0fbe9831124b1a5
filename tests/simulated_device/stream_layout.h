// How a training step is spread over streams. Programs may do so in any of
// these ways, and LibTorch promises that backward is right then.

#ifndef BRIGADE_TESTS_SIMULATED_DEVICE_STREAM_LAYOUT_H_
#define BRIGADE_TESTS_SIMULATED_DEVICE_STREAM_LAYOUT_H_

#include <string>
#include <vector>

namespace brigade::testing {

struct StreamLayout {
  // Streams that parameters are used on, and their gradients made on.
  enum class Forward {
    kCaller,  // backward's caller's
    kSide,    // another one
    kTwo,     // two others in turn
    kOwn,     // one for each parameter
    kBoth,    // each parameter on its own one and on its neighbour's
  };

  Forward forward = Forward::kCaller;
  // Backward's caller is not on the default stream.
  bool calls_from_side = false;
  // The reducer is made on a stream of its own, and so are, at first, buckets.
  bool is_made_on_side = false;
  // Gradients are accumulated, and buckets packed, where forward used the
  // parameter. If not: where the reducer was made.
  bool accumulates_in_forward = false;
};

std::string name_of(const StreamLayout& layout);

// All that differ; under AddressSanitizer one for each kind of forward.
const std::vector<StreamLayout>& all_stream_layouts();

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SIMULATED_DEVICE_STREAM_LAYOUT_H_
