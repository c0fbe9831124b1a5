#include "brigade/reducer/packing/packer.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace brigade {
namespace packing {
namespace {

bool is_real(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
         dtype == at::kDouble;
}

bool is_supported_gradient(at::ScalarType dtype) {
  return is_real(dtype) || dtype == at::kComplexFloat ||
         dtype == at::kComplexDouble;
}

// The table of wire dtypes in packer.h.
bool is_wire_dtype_of(at::ScalarType gradient_dtype,
                      at::ScalarType wire_dtype) {
  if (gradient_dtype == wire_dtype) return is_supported_gradient(wire_dtype);
  return is_real(gradient_dtype) && is_real(wire_dtype) &&
         wire_dtype != at::kDouble;
}

// ---- The CPU: loops over all slots of a bucket, so that a tiny slot costs
// nanoseconds.

// to[k] = from[k] * factor. `from` may be `to`.
struct PlainTransfer {
  template <typename From, typename To>
  void operator()(const From* from, To* to, int64_t numel,
                  Product<From> factor) const {
    for (int64_t k = 0; k < numel; ++k) {
      to[k] = cast<To>(static_cast<Product<From>>(from[k]) * factor);
    }
  }
};

template <typename Gradient, typename Wire, typename Transfer>
void pack_slots(std::span<const SlotRange> slots, const void* const* gradients,
                void* flat, double scale) {
  const auto factor = static_cast<Product<Gradient>>(scale);
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto [offset, numel] = slots[i];
    if (numel == 0) continue;  // the buffer may have no memory
    const auto* from = static_cast<const Gradient*>(gradients[i]);
    Wire* to = static_cast<Wire*>(flat) + offset;
    if (from == nullptr) {
      std::memset(static_cast<void*>(to), 0, numel * sizeof(Wire));
    } else {
      Transfer()(from, to, numel, factor);
    }
  }
}

template <typename Gradient, typename Wire, typename Transfer>
void unpack_slots(std::span<const SlotRange> slots, const void* flat,
                  void* const* gradients) {
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto [offset, numel] = slots[i];
    auto* to = static_cast<Gradient*>(gradients[i]);
    if (to == nullptr) continue;
    Transfer()(static_cast<const Wire*>(flat) + offset, to, numel,
               Product<Wire>{1});
  }
}

template <typename Transfer>
PackLoops loops_by(at::ScalarType gradient, at::ScalarType wire) {
  return visit_pair(gradient, wire, []<typename Gradient, typename Wire>() {
    return PackLoops{.pack = pack_slots<Gradient, Wire, Transfer>,
                     .unpack = unpack_slots<Gradient, Wire, Transfer>};
  });
}

#ifdef __x86_64__

// Only functions with this attribute, and the callees inlined into them, use
// AVX2 and F16C, so the library runs on any x86-64 processor.
// native_pack_loops() checks the processor at run time.
//
// target_clones excludes intrinsics: at 65,536 elements it takes 9 to 25 times
// as long with float16 and 2.1 to 2.4 times with bfloat16.
#define BRIGADE_AVX2 __attribute__((target("avx2,f16c"), flatten))

using at::Half;

constexpr int64_t kLanes = 8;  // of float32

// Compilers do not vectorize c10's conversions of float16.

BRIGADE_AVX2 inline void convert(const Half* from, float* to, int64_t numel) {
  int64_t k = 0;
  for (; k + kLanes <= numel; k += kLanes) {
    const auto* bits = reinterpret_cast<const __m128i*>(from + k);
    _mm256_storeu_ps(to + k, _mm256_cvtph_ps(_mm_loadu_si128(bits)));
  }
  for (; k < numel; ++k) to[k] = _cvtsh_ss(from[k].x);
}

BRIGADE_AVX2 inline void convert(const float* from, Half* to, int64_t numel) {
  int64_t k = 0;
  for (; k + kLanes <= numel; k += kLanes) {
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to + k),
        _mm256_cvtps_ph(_mm256_loadu_ps(from + k), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; k < numel; ++k) {
    to[k].x = _cvtss_sh(from[k], _MM_FROUND_TO_NEAREST_INT);
  }
}

// Small enough to stay in the cache.
using Block = std::array<float, 1024>;

template <typename From>
BRIGADE_AVX2 inline const auto* readable(const From* from, Block& block,
                                         int64_t numel) {
  if constexpr (std::is_same_v<From, Half>) {
    convert(from, block.data(), numel);
    return const_cast<const float*>(block.data());
  } else {
    return from;
  }
}

// Converts float16 through blocks of float32.
struct Avx2Transfer {
  template <typename From, typename To>
  BRIGADE_AVX2 void operator()(const From* from, To* to, int64_t numel,
                               Product<From> factor) const {
    constexpr PlainTransfer kPlain;
    if constexpr (!std::is_same_v<From, Half> && !std::is_same_v<To, Half>) {
      kPlain(from, to, numel, factor);
    } else {
      Block block;
      for (int64_t k = 0; k < numel; k += block.size()) {
        const int64_t size = std::min<int64_t>(numel - k, block.size());
        const auto* source = readable(from + k, block, size);
        if constexpr (std::is_same_v<To, Half>) {
          kPlain(source, block.data(), size, factor);
          convert(block.data(), to + k, size);
        } else {
          kPlain(source, to + k, size, factor);
        }
      }
    }
  }
};

#endif  // __x86_64__

// Minimum size of a slot that is split over ATen's threads. Two threads on two
// cores take 0.8x the time of one; a thread that waits for a core costs far
// more than that saves.
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
        copy(gradients[i], address_of(buffer, i), i);
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
        copy(address_of(const_cast<void*>(buffer), i), gradients[i], i);
      }
    }
  }

 private:
  PackLoops loops_for(const at::Tensor& flat) const {
    const at::ScalarType wire = c10::toRealValueType(flat.scalar_type());
    const PackLoops native = native_pack_loops(dtype_, wire);
    return native.pack != nullptr ? native : portable_pack_loops(dtype_, wire);
  }

  void* address_of(void* buffer, size_t slot) const {
    return static_cast<std::byte*>(buffer) +
           slots_[slot].offset_numel * element_bytes_;
  }

  // Writes zeros if `from` is null; skips memory that is already at `to`.
  void copy(const void* from, void* to, size_t slot) const {
    const size_t bytes = slots_[slot].numel * element_bytes_;
    if (bytes == 0) return;  // `to` may be null
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
      if (gradients[slot] == nullptr) continue;  // the plain loop zeroes it
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

// ---- Other devices.

// Packer for devices other than the CPU and CUDA: one or two ATen operators per
// slot.
class GenericPacker final : public Packer {
 public:
  GenericPacker(PackerArguments arguments, std::vector<SlotRange> slots)
      : arguments_(arguments),
        options_(
            at::TensorOptions(arguments.real_dtype()).device(arguments.device)),
        slots_(std::move(slots)) {}

  void pack(std::span<const void* const> gradients, const at::Tensor& flat,
            double scale) override {
    arguments_.check("Packer::pack", gradients.size(), flat);
    const c10::DeviceGuard on_device(arguments_.device);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor reals = as_reals(flat);
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].numel == 0) continue;
      const at::Tensor slot = slot_of(reals, i);
      if (gradients[i] == nullptr) {
        slot.zero_();
      } else if (gradients[i] != slot.const_data_ptr()) {
        copy_scaled(tensor_at(const_cast<void*>(gradients[i]), i), slot, scale);
      } else if (scale != 1.0) {
        copy_scaled(slot, slot, scale);
      }
    }
  }

  void unpack(const at::Tensor& flat,
              std::span<void* const> gradients) override {
    arguments_.check("Packer::unpack", gradients.size(), flat);
    const c10::DeviceGuard on_device(arguments_.device);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor reals = as_reals(flat);
    for (size_t i = 0; i < slots_.size(); ++i) {
      const at::Tensor slot = slot_of(reals, i);
      if (slots_[i].numel == 0 || gradients[i] == nullptr ||
          gradients[i] == slot.const_data_ptr()) {
        continue;
      }
      tensor_at(gradients[i], i).copy_(slot);
    }
  }

 private:
  static at::Tensor as_reals(const at::Tensor& flat) {
    return flat.is_complex() ? at::view_as_real(flat).view(-1) : flat;
  }

  // Operators in half precision may round the scale before they multiply.
  static void copy_scaled(const at::Tensor& from, const at::Tensor& to,
                          double scale) {
    if (scale == 1.0) {
      to.copy_(from);
      return;
    }
    const at::ScalarType product =
        from.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    to.copy_(from.to(product).mul(scale));
  }

  at::Tensor slot_of(const at::Tensor& reals, size_t slot) const {
    return reals.narrow(0, slots_[slot].offset_numel, slots_[slot].numel);
  }

  at::Tensor tensor_at(void* elements, size_t slot) const {
    return at::for_blob(elements, {slots_[slot].numel})
        .options(options_)
        .target_device(arguments_.device)
        .make_tensor();
  }

  // Constant after construction.
  const PackerArguments arguments_;
  const at::TensorOptions options_;     // of the gradients, as reals
  const std::vector<SlotRange> slots_;  // in reals
};

}  // namespace

PackLoops portable_pack_loops(at::ScalarType gradient, at::ScalarType wire) {
  return loops_by<PlainTransfer>(gradient, wire);
}

PackLoops native_pack_loops(at::ScalarType gradient, at::ScalarType wire) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return loops_by<Avx2Transfer>(gradient, wire);
  }
#endif
  return {};
}

void PackerArguments::check(const char* function, size_t num_gradients,
                            const at::Tensor& flat) const {
  TORCH_CHECK_VALUE(
      num_gradients == num_slots && flat.defined() && flat.device() == device &&
          is_wire_dtype_of(gradient_dtype, flat.scalar_type()) &&
          flat.is_contiguous() && flat.numel() >= min_flat_numel,
      function, ": expected ", num_slots,
      " gradients and a contiguous bucket buffer of at least ", min_flat_numel,
      " elements on ", device, " in a wire dtype for ", gradient_dtype,
      " gradients, found ", num_gradients, " gradients and ",
      flat.defined() ? flat.toString() : "no tensor", " of strides ",
      flat.defined() ? flat.strides() : at::IntArrayRef(), " and sizes ",
      flat.defined() ? flat.sizes() : at::IntArrayRef(),
      ".\nDo not resize or replace the bucket's buffer in the comm hook.");
}

}  // namespace packing

std::unique_ptr<Packer> make_packer(at::Device device,
                                    at::ScalarType gradient_dtype,
                                    std::vector<SlotRange> slots) {
  TORCH_CHECK_VALUE(
      packing::is_supported_gradient(gradient_dtype),
      "make_packer: expected gradients of a floating-point or complex dtype "
      "(float32, float64, float16, bfloat16, complex64, complex128), found ",
      gradient_dtype, ".\nCast the parameters to one of them.");
  TORCH_CHECK_VALUE(
      !device.is_meta(), "make_packer: expected a device with memory, found ",
      device, ".\nMove the parameters to the CPU or to an accelerator.");
  if (!device.is_cpu() && !device.has_index()) {
    device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  }
  const packing::PackerArguments arguments = {
      .device = device,
      .gradient_dtype = gradient_dtype,
      .num_slots = slots.size(),
      .min_flat_numel =
          slots.empty() ? 0 : slots.back().offset_numel + slots.back().numel};
  if (c10::isComplexType(gradient_dtype)) {
    for (SlotRange& slot : slots) {
      slot = {.offset_numel = 2 * slot.offset_numel, .numel = 2 * slot.numel};
    }
  }
  if (device.is_cpu()) {
    return std::make_unique<packing::CpuPacker>(arguments, std::move(slots));
  }
  if (device.is_cuda()) {
    return packing::make_cuda_packer(arguments, std::move(slots));
  }
  return std::make_unique<packing::GenericPacker>(arguments, std::move(slots));
}

}  // namespace brigade
