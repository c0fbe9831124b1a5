// The backend that serves a device in a process group, where there is one.

#ifndef BRIGADE_COMM_GROUP_FIND_BACKEND_H_
#define BRIGADE_COMM_GROUP_FIND_BACKEND_H_

#include <c10/core/DeviceType.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

// Null where the group serves no tensors of this device type, and where it is
// written in Python and so has no backends.
c10::intrusive_ptr<c10d::Backend> find_backend(c10d::ProcessGroup& group,
                                               c10::DeviceType device_type);

// Tensors of the device travel over Gloo: by way of the host, if they are not
// there, as where ranks share a device, which NCCL refuses.
bool is_over_gloo(c10d::ProcessGroup& group, c10::DeviceType device_type);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_FIND_BACKEND_H_
