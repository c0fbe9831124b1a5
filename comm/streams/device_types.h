// Devices whose tensors c10d hands to a group's backends.

#ifndef BRIGADE_COMM_STREAMS_DEVICE_TYPES_H_
#define BRIGADE_COMM_STREAMS_DEVICE_TYPES_H_

#include <c10/core/DeviceType.h>

#include <array>

namespace brigade {

// PrivateUse1: whatever a vendor has registered.
inline constexpr std::array kDeviceTypes = {
    c10::DeviceType::CPU, c10::DeviceType::CUDA, c10::DeviceType::XPU,
    c10::DeviceType::PrivateUse1};

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_DEVICE_TYPES_H_
