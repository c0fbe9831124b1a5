// Stand-ins for a device that works behind its host, and for a group of such:
// tensors are the CPU's, time is the device's.
//
// What is enqueued returns at once and is done in order on a thread of the
// device's. A collective ends there when all ranks' devices have come to
// theirs; for the host it is done at once, as one on a stream is.

#ifndef BRIGADE_BENCHMARKS_RUN_AHEAD_DEVICE_QUEUE_H_
#define BRIGADE_BENCHMARKS_RUN_AHEAD_DEVICE_QUEUE_H_

#include <ATen/core/Tensor.h>

#include <barrier>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace brigade::benchmarks {

// Where the devices of all ranks meet.
class DeviceMeeting {
 public:
  using Clock = std::chrono::steady_clock;

  explicit DeviceMeeting(int world_size);

  // Blocks until all ranks have come with theirs. Returns when the last of them
  // was ready. Errors: c10::Error, on rank 0 alone so that its words are read,
  // if ranks bring unequal tensors: those of one collective are equal here.
  Clock::time_point meet(int rank, const at::Tensor& brought,
                         Clock::time_point ready_at);

 private:
  struct Arrival {
    at::Tensor brought = {};
    Clock::time_point ready_at = {};
  };

  std::barrier<> all_;
  std::vector<Arrival> arrivals_;  // by rank; written by it between barriers
};

// Thread safety: one host thread enqueues.
class DeviceQueue {
 public:
  using Clock = DeviceMeeting::Clock;

  DeviceQueue(int rank, DeviceMeeting& meeting);

  // Ends behind what was enqueued.
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  void compute(Clock::duration time);

  // `tensor` as it is now.
  void all_reduce(const at::Tensor& tensor);

  // The host waits until all is done.
  void synchronize();

 private:
  // From when the device is free to when it is again.
  using Operation = std::function<Clock::time_point(Clock::time_point)>;

  void enqueue(Operation operation);
  void work();

  const int rank_;
  DeviceMeeting& meeting_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_. The one being done is the first until it is over.
  std::deque<Operation> operations_;
  bool is_over_ = false;
  std::jthread thread_;  // ends first
};

// Of ranks that launch the same at any time. All-reduces go to `queue`, which
// outlives the group; what else ranks do with each other is answered at once.
c10::intrusive_ptr<c10d::ProcessGroup> make_device_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    DeviceQueue& queue);

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_RUN_AHEAD_DEVICE_QUEUE_H_
