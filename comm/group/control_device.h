// Where small tensors live that ranks exchange about their work, such as
// fingerprints and orders.
//
// Every rank must choose the same kind of device, or their collectives would
// run on different backends. So the kind is the group's business only, never
// the model's, which may say which one of that kind.

#ifndef BRIGADE_COMM_GROUP_CONTROL_DEVICE_H_
#define BRIGADE_COMM_GROUP_CONTROL_DEVICE_H_

#include <c10/core/Device.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

// The CPU if the group has a backend for it (or registers no backends at all),
// else the group's own device: with the index that the group is bound to, that
// was suggested, or the current one. Thread safety: any thread.
c10::Device control_device(const c10d::ProcessGroup& group);

// For a group that is bound to no device, from whoever knows where the model
// is, before the first collective: programs that move a model to a device need
// not make it the current one, and two ranks that give NCCL tensors of the same
// device fail. The first suggestion of a type that the group serves stands.
// Thread safety: any thread.
void suggest_control_device(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            c10::Device device);

// True if the group can move tensors of this type, as far as it tells.
bool supports_device(const c10d::ProcessGroup& group, c10::DeviceType type);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_CONTROL_DEVICE_H_
