#include "brigade/benchmarks/run_ahead/device_queue.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "brigade/comm/backends/identical_ranks_backend.h"

namespace brigade::benchmarks {
namespace {

class DeviceBackend final : public IdenticalRanksBackend {
 public:
  DeviceBackend(int rank, int world_size, DeviceQueue& queue)
      : IdenticalRanksBackend(rank, world_size), queue_(queue) {}

  const std::string getBackendName() const override { return "device queue"; }
  uint64_t getSequenceNumberForGroup() override { return num_launched_; }

 protected:
  // The host finds the result at once: nobody could tell, and it is known.
  c10::intrusive_ptr<c10d::Work> launch(
      CollectiveCall collective, std::function<void()> compute) override {
    ++num_launched_;
    if (collective.type == c10d::OpType::ALLREDUCE) {
      for (const at::Tensor& input : collective.inputs) {
        queue_.all_reduce(input);
      }
    }
    return IdenticalRanksBackend::launch(std::move(collective),
                                         std::move(compute));
  }

 private:
  DeviceQueue& queue_;
  uint64_t num_launched_ = 0;
};

}  // namespace

DeviceMeeting::DeviceMeeting(int world_size)
    : all_(world_size), arrivals_(world_size) {}

DeviceMeeting::Clock::time_point DeviceMeeting::meet(
    int rank, const at::Tensor& brought, Clock::time_point ready_at) {
  arrivals_[rank] = {.brought = brought, .ready_at = ready_at};
  all_.arrive_and_wait();
  for (const Arrival& arrival : arrivals_) {
    TORCH_CHECK(rank != 0 || at::equal(arrival.brought, brought),
                "ranks met in unlike collectives: rank 0 brought ",
                brought.numel(), " elements, another one ",
                arrival.brought.numel(),
                ", or other values.\nLaunch the same on every rank.");
    ready_at = std::max(ready_at, arrival.ready_at);
  }
  all_.arrive_and_wait();
  return ready_at;
}

DeviceQueue::DeviceQueue(int rank, DeviceMeeting& meeting)
    : rank_(rank), meeting_(meeting), thread_([this] { work(); }) {}

DeviceQueue::~DeviceQueue() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_over_ = true;
  changed_.notify_all();
}

void DeviceQueue::compute(Clock::duration time) {
  enqueue([time](Clock::time_point start) {
    std::this_thread::sleep_until(start + time);
    return start + time;
  });
}

void DeviceQueue::all_reduce(const at::Tensor& tensor) {
  enqueue([this, brought = tensor.detach().clone()](Clock::time_point start) {
    return meeting_.meet(rank_, brought, start);
  });
}

void DeviceQueue::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return operations_.empty(); });
}

void DeviceQueue::enqueue(Operation operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  operations_.push_back([operation = std::move(operation),
                         enqueued = Clock::now()](Clock::time_point free_at) {
    return operation(std::max(free_at, enqueued));
  });
  changed_.notify_all();
}

// The device's clock is that of what it was given: a sleep that ends late does
// not make it slower.
void DeviceQueue::work() {
  Clock::time_point free_at = Clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_over_ || !operations_.empty(); });
    if (operations_.empty()) return;
    const Operation& operation = operations_.front();
    lock.unlock();
    free_at = operation(free_at);
    lock.lock();
    operations_.pop_front();
    if (operations_.empty()) changed_.notify_all();
  }
}

c10::intrusive_ptr<c10d::ProcessGroup> make_device_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    DeviceQueue& queue) {
  using c10d::ProcessGroup;
  auto group = c10::make_intrusive<ProcessGroup>(store, rank, world_size);
  group->setBackend(
      at::kCPU, ProcessGroup::BackendType::CUSTOM,
      c10::intrusive_ptr<c10d::Backend>(
          c10::make_intrusive<DeviceBackend>(rank, world_size, queue)));
  group->setDefaultBackend(ProcessGroup::BackendType::CUSTOM);
  group->setGroupName("device queue");
  return group;
}

}  // namespace brigade::benchmarks
