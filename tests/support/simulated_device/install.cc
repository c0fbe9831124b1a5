#include "brigade/tests/support/simulated_device/install.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "brigade/tests/support/simulated_device/device_allocator.h"
#include "brigade/tests/support/simulated_device/device_guard.h"
#include "brigade/tests/support/simulated_device/device_hooks.h"
#include "brigade/tests/support/simulated_device/operators.h"
#include "brigade/tests/support/simulated_device/simulation.h"

namespace brigade::simulated {

void install(int num_devices) {
  Simulation::start(num_devices);
  // Without a name of its own it is not the process's accelerator.
  c10::register_privateuse1_backend("sim");
  c10::impl::registerDeviceGuard(kDeviceType, new DeviceGuard);
  c10::SetAllocator(kDeviceType, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new DeviceHooks);
  register_operators();
}

}  // namespace brigade::simulated
