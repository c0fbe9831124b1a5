// Streams and events of simulated devices, as LibTorch asks for them.
//
// Thread safety: any thread; current devices and streams are a thread's own.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_GUARD_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_GUARD_H_

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace brigade::simulated {

// The calling thread's. `device` may have no index: its current one.
c10::Stream current_stream(c10::Device device);

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override;

  c10::Device exchangeDevice(c10::Device device) const override;
  c10::Device getDevice() const override;
  void setDevice(c10::Device device) const override;
  void uncheckedSetDevice(c10::Device device) const noexcept override;
  c10::DeviceIndex deviceCount() const noexcept override;

  c10::Stream getStream(c10::Device device) const override;
  c10::Stream getDefaultStream(c10::Device device) const override;
  c10::Stream getStreamFromGlobalPool(c10::Device device,
                                      bool is_high_priority) const override;
  c10::Stream getNewStream(c10::Device device, int priority) const override;
  c10::Stream exchangeStream(c10::Stream stream) const override;
  bool queryStream(const c10::Stream& stream) const override;
  void synchronizeStream(const c10::Stream& stream) const override;
  void synchronizeDevice(c10::DeviceIndex device) const override;

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex device,
              c10::EventFlag flag) const override;
  void block(void* event, const c10::Stream& stream) const override;
  bool queryEvent(void* event) const override;
  void synchronizeEvent(void* event) const override;
  void destroyEvent(void* event,
                    c10::DeviceIndex device) const noexcept override;
  double elapsedTime(void* from, void* to,
                     c10::DeviceIndex device) const override;

  void recordDataPtrOnStream(const c10::DataPtr& memory,
                             const c10::Stream& stream) const override;
};

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_GUARD_H_
