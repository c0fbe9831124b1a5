// Where small tensors live that ranks exchange about their work, such as
// fingerprints and orders.
//
// Every rank must choose the same kind of device, or their collectives would
// run on different backends. So the choice looks at the group only, never at
// the model.

#ifndef BRIGADE_COMM_CONTROL_DEVICE_H_
#define BRIGADE_COMM_CONTROL_DEVICE_H_

#include <c10/core/Device.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

// The CPU if the group has a backend for it (or registers no backends at all),
// else the group's own device, with the index that the group is bound to or the
// current one. Thread safety: pure.
c10::Device control_device(const c10d::ProcessGroup& group);

// True if the group can move tensors of this type, as far as it tells.
bool supports_device(const c10d::ProcessGroup& group, c10::DeviceType type);

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_DEVICE_H_
