#include "brigade/tests/support/simulated_device/device_allocator.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "brigade/tests/support/simulated_device/device_guard.h"
#include "brigade/tests/support/simulated_device/simulation.h"

namespace brigade::simulated {
namespace {

constexpr size_t kGranularityBytes = 512;
constexpr int kPoison = 0xCB;

struct Block {
  void* begin;
  size_t bytes;
  c10::Stream owner;
  RaceDetector::Moment last_uses;  // by other streams, when it was freed
};

class Blocks {
 public:
  Block take(size_t bytes, const c10::Stream& owner) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block block = find_or_reserve(bytes, owner);
    held_.insert_or_assign(block.begin, block);
    return block;
  }

  void give_back(void* begin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto held = held_.find(begin);
    held->second.last_uses = Simulation::get().freed(begin);
    free_.push_back(std::move(held->second));
    held_.erase(held);
  }

 private:
  // What was freed last, first.
  Block find_or_reserve(size_t bytes, const c10::Stream& owner) {
    for (size_t i = free_.size(); i-- > 0;) {
      const Block& candidate = free_[i];
      if (candidate.bytes != bytes || candidate.owner != owner ||
          !Simulation::get().may_serve(owner, candidate.last_uses)) {
        continue;
      }
      Block block = candidate;
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
      return block;
    }
    void* const begin =
        Simulation::get().memory().reserve(owner.device_index(), bytes);
    return {.begin = begin, .bytes = bytes, .owner = owner, .last_uses = {}};
  }

  std::mutex mutex_;
  // Guarded by mutex_.
  std::unordered_map<void*, Block> held_;  // by begin
  std::vector<Block> free_;                // by the time they were freed
};

Blocks& blocks() {
  static Blocks* const blocks = new Blocks;
  return *blocks;
}

void free_block(void* begin) {
  if (begin != nullptr) blocks().give_back(begin);
}

}  // namespace

c10::DataPtr DeviceAllocator::allocate(size_t bytes) {
  const c10::Stream owner = current_stream(c10::Device(kDeviceType));
  const size_t granules =
      std::max<size_t>(1, (bytes + kGranularityBytes - 1) / kGranularityBytes);
  Simulation& simulation = Simulation::get();
  const Block block = blocks().take(granules * kGranularityBytes, owner);
  simulation.allocated(block.begin, block.bytes, owner);
  std::memset(simulation.memory().for_kernels(block.begin), kPoison,
              block.bytes);
  return {block.begin, block.begin, &free_block, owner.device()};
}

c10::DeleterFnPtr DeviceAllocator::raw_deleter() const { return &free_block; }

void DeviceAllocator::copy_data(void* to, const void* from,
                                size_t bytes) const {
  Simulation& simulation = Simulation::get();
  const DeviceMemory& memory = simulation.memory();
  simulation.run(
      "copy", current_stream(c10::Device(kDeviceType, *memory.device_of(to))),
      {{.begin = from, .bytes = bytes},
       {.begin = to, .bytes = bytes, .writes = true}},
      [&] {
        std::memcpy(memory.for_kernels(to), memory.for_kernels(from), bytes);
      });
}

DeviceAllocator& device_allocator() {
  static DeviceAllocator* const allocator = new DeviceAllocator;
  return *allocator;
}

}  // namespace brigade::simulated
