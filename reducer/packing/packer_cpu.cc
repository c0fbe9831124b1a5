#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstring>
#include <utility>

#include "brigade/reducer/packing/pack_loops.h"
#include "brigade/reducer/packing/packer_devices.h"

namespace brigade {
namespace {

// From this size on a slot is cut over ATen's threads, where there are several.
// With 2 threads on 2 cores the best quarter of runs took 0.8x the time of one
// loop; threads that wait for a core cost far more than they save, so small
// slots keep to the loop.
constexpr int64_t kThreadedSlotBytes = int64_t{1} << 20;

class CpuPacker final : public Packer {
 public:
  CpuPacker(PackerArguments arguments, std::vector<SlotRange> slots)
      : arguments_(arguments),
        dtype_(arguments.real_dtype()),
        element_bytes_(static_cast<int64_t>(c10::elementSize(dtype_))),
        slots_(std::move(slots)) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].numel * element_bytes_ >= kThreadedSlotBytes) {
        threaded_slots_.push_back(i);
      }
    }
  }

  void pack(std::span<const void* const> gradients, const at::Tensor& flat,
            double scale) override {
    arguments_.check("Packer::pack", gradients.size(), flat);
    void* const buffer = flat.mutable_data_ptr();
    const bool is_cast = flat.scalar_type() != arguments_.gradient_dtype;
    if (!is_cast && !arguments_.changes_values(scale)) {
      for (size_t i = 0; i < slots_.size(); ++i) {
        copy(gradients[i], place(buffer, i), i);
      }
      return;
    }
    const PackLoop loop = loops_for(flat).pack;
    if (threaded_slots_.empty() || at::get_num_threads() == 1) {
      loop(slots_, gradients.data(), buffer, scale);
    } else {
      pack_with_threads(loop, gradients, buffer, scale);
    }
  }

  void unpack(const at::Tensor& flat,
              std::span<void* const> gradients) override {
    arguments_.check("Packer::unpack", gradients.size(), flat);
    const void* const buffer = flat.const_data_ptr();
    if (flat.scalar_type() != arguments_.gradient_dtype) {
      loops_for(flat).unpack(slots_, buffer, gradients.data());
      return;
    }
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (gradients[i] != nullptr) {
        copy(place(const_cast<void*>(buffer), i), gradients[i], i);
      }
    }
  }

 private:
  // The best loops for gradients to and from `flat`.
  PackLoops loops_for(const at::Tensor& flat) const {
    const at::ScalarType wire = c10::toRealValueType(flat.scalar_type());
    const PackLoops native = native_pack_loops(dtype_, wire);
    return native.pack != nullptr ? native : portable_pack_loops(dtype_, wire);
  }

  void* place(void* buffer, size_t slot) const {
    return static_cast<std::byte*>(buffer) +
           slots_[slot].offset_numel * element_bytes_;
  }

  // A null source is all zeros; memory is never copied onto itself.
  void copy(const void* from, void* to, size_t slot) const {
    const size_t bytes = slots_[slot].numel * element_bytes_;
    if (bytes == 0) return;  // perhaps without memory
    if (from == nullptr) {
      std::memset(to, 0, bytes);
    } else if (from != to) {
      std::memcpy(to, from, bytes);
    }
  }

  void pack_with_threads(PackLoop loop, std::span<const void* const> gradients,
                         void* buffer, double scale) const {
    const std::span<const SlotRange> slots = slots_;
    size_t next = 0;
    for (const size_t slot : threaded_slots_) {
      if (gradients[slot] == nullptr) continue;  // the loop writes its zeros
      loop(slots.subspan(next, slot - next), gradients.data() + next, buffer,
           scale);
      at::parallel_for(0, slots[slot].numel, at::internal::GRAIN_SIZE,
                       [&](int64_t begin, int64_t end) {
                         const SlotRange part = {
                             .offset_numel = slots[slot].offset_numel + begin,
                             .numel = end - begin};
                         const void* const from =
                             static_cast<const std::byte*>(gradients[slot]) +
                             begin * element_bytes_;
                         loop({&part, 1}, &from, buffer, scale);
                       });
      next = slot + 1;
    }
    loop(slots.subspan(next), gradients.data() + next, buffer, scale);
  }

  const PackerArguments arguments_;
  const at::ScalarType dtype_;  // real
  const int64_t element_bytes_;
  const std::vector<SlotRange> slots_;  // in elements of dtype_
  std::vector<size_t> threaded_slots_;  // ascending
};

}  // namespace

std::unique_ptr<Packer> make_cpu_packer(PackerArguments arguments,
                                        std::vector<SlotRange> slots) {
  return std::make_unique<CpuPacker>(arguments, std::move(slots));
}

}  // namespace brigade
