// What a built-in comm hook wants to find in a bucket's buffer.
//
// A hook that declares its wire format gets buffers which already hold scaled
// gradients in the wire dtype: the reducer folds scale and cast into the one
// pass that packs the bucket. Other hooks get raw gradients in the parameters'
// dtype and average by themselves.

#ifndef BRIGADE_COMM_HOOKS_WIRE_FORMAT_H_
#define BRIGADE_COMM_HOOKS_WIRE_FORMAT_H_

#include <c10/core/ScalarType.h>

#include <torch/csrc/distributed/c10d/comm.hpp>

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

  // Whether no code of a user's runs in runHook() or its future: what goes wrong
  // there is the network's doing, and nobody keeps the bucket.
  virtual bool runs_no_user_code() const { return true; }

 protected:
  ~DeclaresWireFormat() = default;
};

// False for a user's hook.
inline bool runs_no_user_code(const c10d::CommHookInterface& hook) {
  const auto* declared = dynamic_cast<const DeclaresWireFormat*>(&hook);
  return declared != nullptr && declared->runs_no_user_code();
}

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_WIRE_FORMAT_H_
