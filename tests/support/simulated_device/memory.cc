#include "brigade/tests/support/simulated_device/memory.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "brigade/tests/support/simulated_device/device.h"
#include "brigade/tests/support/simulated_device/ordering_calls.h"
#include "brigade/tests/support/simulated_device/simulation.h"

namespace brigade::simulated {
namespace {

// Size of a device. Pages occupy memory when they are first written.
constexpr size_t kDeviceBytes = size_t{1} << 30;
constexpr size_t kDeviceGranularity = 512;
constexpr size_t kPinnedGranularity = 64;
constexpr int kPoison = 0xCB;

size_t rounded(size_t bytes, size_t granularity) {
  return std::max<size_t>(1, (bytes + granularity - 1) / granularity) *
         granularity;
}

struct Mapping {
  char* addresses;  // of tensors; not accessible
  char* memory;     // the same bytes, for kernels
};

char* map_memory(int file, int protection) {
  void* const address =
      mmap(nullptr, kDeviceBytes, protection, MAP_SHARED, file, 0);
  TORCH_CHECK(address != MAP_FAILED, "simulated device: mmap of ", kDeviceBytes,
              " bytes failed.\nRun fewer tests at once.");
  return static_cast<char*>(address);
}

// By device.
const std::vector<Mapping>& mappings() {
  static const auto* const all = [] {
    auto* const made = new std::vector<Mapping>;
    for (int d = 0; d < Simulation::get().num_devices(); ++d) {
      const int file = memfd_create("simulated_device", 0);
      TORCH_CHECK(file >= 0 && ftruncate(file, kDeviceBytes) == 0,
                  "simulated device: memfd of ", kDeviceBytes,
                  " bytes failed.\nRun fewer tests at once.");
      made->push_back({.addresses = map_memory(file, PROT_NONE),
                       .memory = map_memory(file, PROT_READ | PROT_WRITE)});
      close(file);
    }
    return made;
  }();
  return *all;
}

struct Block {
  void* begin;
  size_t bytes;
  c10::Stream owner;
  RaceDetector::Moment last_uses;  // by other streams, at the free
};

class DeviceBlocks {
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
  // Returns the most recently freed block that fits, or a new one.
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
    size_t& used = used_bytes_[owner.device_index()];
    TORCH_CHECK(used + bytes <= kDeviceBytes, owner.device(), ": requested ",
                bytes, " bytes, found ", kDeviceBytes - used,
                " free.\nUse smaller tensors.");
    void* const begin = mappings().at(owner.device_index()).addresses + used;
    used += bytes;
    return {.begin = begin, .bytes = bytes, .owner = owner, .last_uses = {}};
  }

  std::mutex mutex_;
  // Guarded by mutex_.
  std::unordered_map<void*, Block> held_;  // by begin
  std::vector<Block> free_;                // in the order of their frees
  std::map<c10::DeviceIndex, size_t> used_bytes_;
};

DeviceBlocks& device_blocks() {
  static DeviceBlocks* const blocks = new DeviceBlocks;
  return *blocks;
}

void free_block(void* begin) {
  if (begin != nullptr) device_blocks().give_back(begin);
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Stream owner = current_stream(c10::Device(kDeviceType));
    const Block block =
        device_blocks().take(rounded(bytes, kDeviceGranularity), owner);
    Simulation::get().allocated(block.begin, block.bytes, owner);
    std::memset(for_kernels(block.begin), kPoison, block.bytes);
    return {block.begin, block.begin, &free_block, owner.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Simulation::get().run(
        "copy", current_stream(c10::Device(kDeviceType, *device_of(to))),
        {{.begin = from, .bytes = bytes},
         {.begin = to, .bytes = bytes, .writes = true}},
        [&] { std::memcpy(for_kernels(to), for_kernels(from), bytes); });
  }
};

// Pinned memory; never returned to the system.
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
        static_cast<char*>(std::aligned_alloc(kPinnedGranularity, bytes));
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
  struct PinnedBlock {
    size_t bytes = 0;
    bool is_free = false;
  };

  static bool may_serve(const char* begin, size_t bytes) {
    return !Simulation::get().is_in_use_by_copies(begin, bytes) ||
           is_dropped({.kind = OrderingCall::kHoldPinned});
  }

  std::mutex mutex_;
  std::map<char*, PinnedBlock> blocks_;  // guarded by mutex_; by begin
};

PinnedBlocks& pinned_blocks() {
  static PinnedBlocks* const blocks = new PinnedBlocks;
  return *blocks;
}

void free_pinned(void* begin) {
  if (begin != nullptr) pinned_blocks().give_back(begin);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const begin =
        pinned_blocks().take(rounded(bytes, kPinnedGranularity));
    return {begin, begin, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

c10::Allocator& device_allocator() {
  static auto* const allocator = new DeviceAllocator;
  return *allocator;
}

c10::Allocator& pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return *allocator;
}

void* for_kernels(const void* address) {
  const std::optional<c10::DeviceIndex> device = device_of(address);
  TORCH_CHECK(device, "simulated device: kernel argument ", address,
              " is not device memory.\nMove the tensor there first.");
  const Mapping& mapping = mappings()[*device];
  return mapping.memory +
         (static_cast<const char*>(address) - mapping.addresses);
}

std::optional<c10::DeviceIndex> device_of(const void* address) {
  for (size_t d = 0; d < mappings().size(); ++d) {
    const char* const begin = mappings()[d].addresses;
    if (begin <= address && address < begin + kDeviceBytes) {
      return static_cast<c10::DeviceIndex>(d);
    }
  }
  return std::nullopt;
}

bool is_pinned(const void* address) {
  return pinned_blocks().contain(static_cast<const char*>(address));
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  const c10::DeviceGuard on_device(storage.device());
  c10::DataPtr memory = bytes == 0 ? c10::DataPtr(nullptr, storage.device())
                                   : device_allocator().allocate(bytes);
  const size_t kept_bytes = std::min(bytes, storage.nbytes());
  if (kept_bytes > 0) {
    device_allocator().copy_data(memory.get(), storage.data(), kept_bytes);
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

}  // namespace brigade::simulated
