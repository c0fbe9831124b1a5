#include "brigade/tests/support/simulated_device/pinned_allocator.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>

#include "brigade/tests/support/simulated_device/ordering_calls.h"
#include "brigade/tests/support/simulated_device/simulation.h"

namespace brigade::simulated {
namespace {

constexpr size_t kGranularityBytes = 64;

// Never given back to the system.
class PinnedBlocks {
 public:
  void* take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [begin, block] : blocks_) {
      if (block.is_free && block.bytes == bytes && may_serve(begin, bytes)) {
        block.is_free = false;
        return begin;
      }
    }
    char* const begin =
        static_cast<char*>(std::aligned_alloc(kGranularityBytes, bytes));
    blocks_[begin] = {.bytes = bytes, .is_free = false};
    return begin;
  }

  void give_back(void* begin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.at(static_cast<char*>(begin)).is_free = true;
  }

  bool contain(const char* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto after = blocks_.upper_bound(const_cast<char*>(address));
    if (after == blocks_.begin()) return false;
    const auto& [begin, block] = *std::prev(after);
    return !block.is_free && address < begin + block.bytes;
  }

 private:
  struct Block {
    size_t bytes = 0;
    bool is_free = false;
  };

  static bool may_serve(const char* begin, size_t bytes) {
    return !Simulation::get().is_in_use_by_copies(begin, bytes) ||
           is_dropped({.kind = OrderingCall::kHoldPinned});
  }

  std::mutex mutex_;
  std::map<char*, Block> blocks_;  // guarded by mutex_; by begin
};

PinnedBlocks& pinned_blocks() {
  static PinnedBlocks* const blocks = new PinnedBlocks;
  return *blocks;
}

void free_pinned(void* begin) {
  if (begin != nullptr) pinned_blocks().give_back(begin);
}

}  // namespace

c10::DataPtr PinnedAllocator::allocate(size_t bytes) {
  const size_t granules =
      std::max<size_t>(1, (bytes + kGranularityBytes - 1) / kGranularityBytes);
  void* const begin = pinned_blocks().take(granules * kGranularityBytes);
  return {begin, begin, &free_pinned, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr PinnedAllocator::raw_deleter() const { return &free_pinned; }

void PinnedAllocator::copy_data(void* to, const void* from,
                                size_t bytes) const {
  default_copy_data(to, from, bytes);
}

PinnedAllocator& pinned_allocator() {
  static PinnedAllocator* const allocator = new PinnedAllocator;
  return *allocator;
}

bool is_pinned(const void* address) {
  return pinned_blocks().contain(static_cast<const char*>(address));
}

}  // namespace brigade::simulated
