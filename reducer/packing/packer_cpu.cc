#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul_cpu_dispatch.h>

#include <cstddef>
#include <cstring>
#include <utility>

#include "brigade/reducer/packing/pack_loops.h"
#include "brigade/reducer/packing/packer_devices.h"

namespace brigade {
namespace {

// From this size on a slot goes to ATen's threads, where there are several.
// With 2 threads on 2 cores the best quarter of runs took 0.8x the time of one
// loop; threads that wait for a core cost far more than they save, so small
// slots keep to the loop.
constexpr int64_t kThreadedSlotBytes = int64_t{1} << 20;

// A tensor over memory that is given anew for each use.
class Window {
 public:
  Window(int64_t numel, at::ScalarType dtype) : tensor_(at::empty({0}, dtype)) {
    const int64_t bytes = numel * static_cast<int64_t>(tensor_.itemsize());
    storage()->set_nbytes(bytes);
    tensor_.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  }

  at::Tensor& over(void* address) {
    storage()->set_data_ptr_noswap(at::DataPtr(address, at::kCPU));
    return tensor_;
  }

 private:
  c10::StorageImpl* storage() {
    return tensor_.storage().unsafeGetStorageImpl();
  }

  at::Tensor tensor_;  // 1D, [numel]
};

// Multiplies a large slot on ATen's threads.  Source and result have the dtype.
class ThreadedSlot {
 public:
  ThreadedSlot(size_t slot, int64_t numel, at::ScalarType dtype)
      : slot_(slot), from_(numel, dtype), to_(numel, dtype) {}

  size_t slot() const { return slot_; }

  // `factor` is 0-dimensional, of the dtype: nothing is cast or allocated.
  void multiply(const void* from, void* to, const at::Tensor& factor) {
    at::Tensor& result = to_.over(to);
    // ATen's multiplication reads its first argument only.
    at::cpu::mul_out(result, from_.over(const_cast<void*>(from)), factor);
  }

 private:
  size_t slot_;
  Window from_;
  Window to_;
};

class CpuPacker final : public Packer {
 public:
  CpuPacker(PackerArguments arguments, std::vector<SlotRange> slots)
      : arguments_(arguments),
        dtype_(arguments.real_dtype()),
        element_bytes_(c10::elementSize(dtype_)),
        slots_(std::move(slots)) {
    if (dtype_ != at::kFloat && dtype_ != at::kDouble) return;
    factor_ = at::empty({}, dtype_);
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].numel * element_bytes_ >= kThreadedSlotBytes) {
        threaded_slots_.emplace_back(i, slots_[i].numel, dtype_);
      }
    }
  }

  void pack(std::span<const void* const> gradients, const at::Tensor& flat,
            double scale) override {
    arguments_.check("Packer::pack", gradients.size(), flat);
    void* const buffer = flat.mutable_data_ptr();
    const bool is_cast = flat.scalar_type() != arguments_.gradient_dtype;
    if (!is_cast && !changes_values(scale)) {
      for (size_t i = 0; i < slots_.size(); ++i) {
        copy(gradients[i], place(buffer, i), i);
      }
      return;
    }
    const PackLoop loop = loops_for(flat).pack;
    if (is_cast || threaded_slots_.empty() || at::get_num_threads() == 1) {
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
  bool changes_values(double scale) const {
    return dtype_ == at::kDouble ? scale != 1.0
                                 : static_cast<float>(scale) != 1.0F;
  }

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
                         void* buffer, double scale) {
    if (dtype_ == at::kDouble) {
      *factor_.mutable_data_ptr<double>() = scale;
    } else {
      *factor_.mutable_data_ptr<float>() = static_cast<float>(scale);
    }
    const std::span<const SlotRange> slots = slots_;
    size_t next = 0;
    for (ThreadedSlot& threaded : threaded_slots_) {
      const size_t slot = threaded.slot();
      if (gradients[slot] == nullptr) continue;  // the loop writes its zeros
      loop(slots.subspan(next, slot - next), gradients.data() + next, buffer,
           scale);
      threaded.multiply(gradients[slot], place(buffer, slot), factor_);
      next = slot + 1;
    }
    loop(slots.subspan(next), gradients.data() + next, buffer, scale);
  }

  // Constant after construction.
  const PackerArguments arguments_;
  const at::ScalarType dtype_;  // real
  const int64_t element_bytes_;
  const std::vector<SlotRange> slots_;  // in elements of dtype_

  // Used while ATen's threads multiply.
  std::vector<ThreadedSlot> threaded_slots_;  // ascending
  at::Tensor factor_;                         // 0D, dtype_
};

}  // namespace

std::unique_ptr<Packer> make_cpu_packer(PackerArguments arguments,
                                        std::vector<SlotRange> slots) {
  return std::make_unique<CpuPacker>(arguments, std::move(slots));
}

}  // namespace brigade
