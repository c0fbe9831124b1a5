// What a built-in comm hook wants to find in a bucket's buffer.
//
// A hook that declares its wire format gets buffers which already hold scaled
// gradients in the wire dtype: the reducer folds scale and cast into the one
// pass that packs the bucket. Other hooks get raw gradients in the parameters'
// dtype and average by themselves.

#ifndef BRIGADE_COMM_HOOKS_WIRE_FORMAT_H_
#define BRIGADE_COMM_HOOKS_WIRE_FORMAT_H_

#include <c10/core/ScalarType.h>

namespace brigade {

struct WireFormat {
  at::ScalarType dtype;  // of the buffer that travels
  double scale = 1.0;    // multiplies every gradient before the cast

  friend bool operator==(const WireFormat&, const WireFormat&) = default;
};

class DeclaresWireFormat {
 public:
  // The format for gradients of `gradient_dtype`. The dtype is asked for once,
  // the scale for every bucket of every iteration.
  virtual WireFormat wire_format(at::ScalarType gradient_dtype) const = 0;

  // Whether what goes wrong in runHook() or its future is the network's doing:
  // no code of a user's runs there.
  virtual bool fails_by_network_only() const { return true; }

  // Whether nobody writes to the bucket's buffer, or shows it to others, once
  // the hook's future is complete. Then its memory may become the gradients'.
  virtual bool lets_go_of_buffer() const { return false; }

  // Whether the bits of the result are those of the ranks' values, added in
  // the order of the ranks, however gradients are cut into buckets.
  virtual bool sums_in_order() const { return false; }

 protected:
  ~DeclaresWireFormat() = default;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_WIRE_FORMAT_H_
