// Packer for CUDA: one kernel moves all slots of a bucket.
//
// Each block moves one chunk of the flat buffer. Chunks have equal size, which
// balances bytes rather than slots. A table made at construction gives the
// first slot of each chunk; threads search from there.
//
// The gradients' addresses change from step to step. Up to kMaxInlineSlots
// addresses are kernel arguments; more are copied to the device.

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "brigade/reducer/packing/packer.h"

namespace brigade::packing {
namespace {

constexpr int kThreads = 256;
// Keeps enough loads in flight; with more blocks the registers do not suffice.
constexpr int kMinBlocksPerMultiprocessor = 6;
// Gradient bytes per chunk: four loads of 16 bytes per thread.
constexpr int64_t kChunkBytes = int64_t{kThreads} * 16 * 4;
// Keeps all kernel arguments below the limit of 4 KiB.
constexpr int kMaxInlineSlots = 480;

enum class Direction { kPack, kUnpack };

// A slot's elements in the flat buffer: [begin, end).
struct Place {
  int64_t begin;
  int64_t end;
};

// Constant tables on the device.
struct Tables {
  const Place* places;            // [num_slots]
  const int32_t* first_in_chunk;  // [num_chunks + 1]: the first slot that ends
                                  // after the chunk begins
  int32_t num_slots;
  int64_t flat_numel;  // where the last slot ends
};

// Addresses of the gradients, by slot.
struct InlineAddresses {
  void* at[kMaxInlineSlots];
};
struct StagedAddresses {
  void* const* at;
};

// Elements that one thread moves at once: 16 bytes of the narrower dtype.
template <typename Gradient, typename Wire>
constexpr int kGroup = 16 / std::min(sizeof(Gradient), sizeof(Wire));

template <typename T, int kCount>
struct alignas(16) Vector {
  static constexpr int kNumWords = kCount * sizeof(T) / sizeof(uint4);
  static_assert(kNumWords * sizeof(uint4) == kCount * sizeof(T));

  T values[kCount];

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) {
      const uint4 word = reinterpret_cast<const uint4*>(from)[i];
      std::memcpy(values + i * kPerWord, &word, sizeof(word));
    }
  }

  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) {
      uint4 word;
      std::memcpy(&word, values + i * kPerWord, sizeof(word));
      reinterpret_cast<uint4*>(to)[i] = word;
    }
  }

 private:
  static constexpr int kPerWord = sizeof(uint4) / sizeof(T);
};

__device__ __forceinline__ bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

template <typename Gradient, typename Wire, Direction kDirection>
struct Mover {
  using From =
      std::conditional_t<kDirection == Direction::kPack, Gradient, Wire>;
  using To = std::conditional_t<kDirection == Direction::kPack, Wire, Gradient>;
  static constexpr int kCount = kGroup<Gradient, Wire>;

  Product<Gradient> scale;

  __device__ __forceinline__ bool copies() const {
    return std::is_same_v<From, To> && scale == Product<Gradient>{1};
  }

  __device__ __forceinline__ To change(From value) const {
    if constexpr (kDirection == Direction::kPack) {
      if constexpr (std::is_same_v<From, To>) {
        if (copies()) return value;
      }
      return cast<To>(static_cast<Product<Gradient>>(value) * scale);
    } else if constexpr (std::is_same_v<From, To>) {
      return value;
    } else {
      return cast<To>(static_cast<Product<From>>(value));
    }
  }

  __device__ __forceinline__ void change(const Vector<From, kCount>& from,
                                         Vector<To, kCount>& to) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to.values[i] = change(from.values[i]);
  }

  // Moves kCount elements, in words of 16 bytes on each side that is aligned.
  __device__ __forceinline__ void move_group(const From* from, To* to) const {
    Vector<From, kCount> source;
    Vector<To, kCount> result;
    if (is_aligned(from)) {
      source.load(from);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) source.values[i] = from[i];
    }
    change(source, result);
    if (is_aligned(to)) {
      result.store(to);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i] = result.values[i];
    }
  }
};

// True if there is no gradient to write, or it already holds the result.
template <typename Gradient, typename Wire, Direction kDirection>
__device__ __forceinline__ bool has_nothing_to_do(
    const Mover<Gradient, Wire, kDirection>& mover, const Gradient* gradient,
    const Wire* place) {
  if (kDirection == Direction::kUnpack && gradient == nullptr) return true;
  return mover.copies() &&
         static_cast<const void*>(gradient) == static_cast<const void*>(place);
}

// Moves one chunk of `flat` per block. One thread reads and writes each
// element, so a gradient can be scaled in place.
template <typename Gradient, typename Wire, Direction kDirection,
          typename Addresses>
__global__ void __launch_bounds__(kThreads, kMinBlocksPerMultiprocessor)
    move_slots(const __grid_constant__ Addresses addresses, const Tables tables,
               Wire* const flat, const Product<Gradient> scale) {
  using M = Mover<Gradient, Wire, kDirection>;
  constexpr int kCount = M::kCount;
  constexpr int64_t kChunkNumel = kChunkBytes / sizeof(Gradient);
  constexpr int kNumGroups = kChunkNumel / (kThreads * kCount);
  static_assert(kNumGroups * kThreads * kCount == kChunkNumel);
  constexpr bool kPacks = kDirection == Direction::kPack;

  const M mover{scale};
  const int64_t chunk_begin = blockIdx.x * kChunkNumel;
  const int64_t chunk_end = min(chunk_begin + kChunkNumel, tables.flat_numel);
  const int32_t first = tables.first_in_chunk[blockIdx.x];
  const int32_t last =
      min(tables.first_in_chunk[blockIdx.x + 1], tables.num_slots - 1);

  // Fast path: a full chunk inside one slot, both sides aligned. All loads are
  // issued before the first store.
  if (const Place place = tables.places[first];
      place.begin <= chunk_begin && chunk_begin + kChunkNumel <= place.end) {
    auto* const slot_gradient = static_cast<Gradient*>(addresses.at[first]);
    if (has_nothing_to_do(mover, slot_gradient, flat + place.begin)) return;
    Gradient* const gradient = slot_gradient + (chunk_begin - place.begin);
    Wire* const wire = flat + chunk_begin;
    if (slot_gradient != nullptr && is_aligned(gradient) && is_aligned(wire)) {
      Vector<typename M::From, kCount> source[kNumGroups];
      const typename M::From* from;
      typename M::To* to;
      if constexpr (kPacks) {
        from = gradient;
        to = wire;
      } else {
        from = wire;
        to = gradient;
      }
#pragma unroll
      for (int i = 0; i < kNumGroups; ++i) {
        source[i].load(from + (i * kThreads + threadIdx.x) * kCount);
      }
#pragma unroll
      for (int i = 0; i < kNumGroups; ++i) {
        Vector<typename M::To, kCount> result;
        mover.change(source[i], result);
        result.store(to + (i * kThreads + threadIdx.x) * kCount);
      }
      return;
    }
  }

  for (int64_t group = chunk_begin + threadIdx.x * kCount; group < chunk_end;
       group += kThreads * kCount) {
    // The first slot that ends after the group begins.
    int32_t low = first;
    int32_t high = last;
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (tables.places[middle].end > group) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int64_t group_end = min(group + kCount, chunk_end);
    for (int32_t slot = low; slot <= last; ++slot) {
      const Place place = tables.places[slot];
      if (place.begin >= group_end) break;
      auto* const slot_gradient = static_cast<Gradient*>(addresses.at[slot]);
      if (has_nothing_to_do(mover, slot_gradient, flat + place.begin)) continue;
      const int64_t begin = max(place.begin, group);
      const int64_t end = min(place.end, group_end);
      if (slot_gradient == nullptr) {
        for (int64_t k = begin; k < end; ++k) flat[k] = Wire(0.0F);
        continue;
      }
      Gradient* const gradient = slot_gradient + (begin - place.begin);
      if (end - begin == kCount) {
        if constexpr (kPacks) {
          mover.move_group(gradient, flat + begin);
        } else {
          mover.move_group(flat + begin, gradient);
        }
        continue;
      }
      for (int64_t k = begin; k < end; ++k) {
        if constexpr (kPacks) {
          flat[k] = mover.change(gradient[k - begin]);
        } else {
          gradient[k - begin] = mover.change(flat[k]);
        }
      }
    }
  }
}

// Copies addresses to device memory on the current stream. The allocators reuse
// the pinned memory after the copy, and the device memory in stream order. Both
// may be freed once the kernel that reads them is enqueued.
at::DataPtr copy_to_device(std::span<const void* const> addresses,
                           c10::cuda::CUDAStream stream) {
  auto* const pinned = at::getHostAllocator(at::kCUDA);
  const size_t num_bytes = addresses.size_bytes();
  const at::DataPtr host = pinned->allocate(num_bytes);
  at::DataPtr device =
      c10::cuda::CUDACachingAllocator::get()->allocate(num_bytes);
  std::memcpy(host.get(), addresses.data(), num_bytes);
  C10_CUDA_CHECK(cudaMemcpyAsync(device.get(), host.get(), num_bytes,
                                 cudaMemcpyHostToDevice, stream));
  pinned->record_event(host.get(), host.get_context(), stream.unwrap());
  return device;
}

struct LaunchArguments {
  std::span<const void* const> gradients;
  Tables tables;
  void* flat;
  double scale;
  void* const* on_device;  // addresses; null: pass them as kernel arguments
  c10::cuda::CUDAStream stream;
};

template <typename Gradient, typename Wire, Direction kDirection>
void launch(const LaunchArguments& arguments) {
  constexpr int64_t kChunkNumel = kChunkBytes / sizeof(Gradient);
  const auto num_blocks = static_cast<unsigned>(
      (arguments.tables.flat_numel + kChunkNumel - 1) / kChunkNumel);
  auto* const flat = static_cast<Wire*>(arguments.flat);
  const auto scale = static_cast<Product<Gradient>>(arguments.scale);
  if (arguments.on_device == nullptr) {
    InlineAddresses addresses;
    std::memcpy(addresses.at, arguments.gradients.data(),
                arguments.gradients.size_bytes());
    move_slots<Gradient, Wire, kDirection>
        <<<num_blocks, kThreads, 0, arguments.stream>>>(
            addresses, arguments.tables, flat, scale);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  move_slots<Gradient, Wire, kDirection>
      <<<num_blocks, kThreads, 0, arguments.stream>>>(
          StagedAddresses{arguments.on_device}, arguments.tables, flat, scale);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

using Launcher = void (*)(const LaunchArguments&);

template <Direction kDirection>
struct LauncherOf {
  template <typename Gradient, typename Wire>
  Launcher operator()() const {
    return launch<Gradient, Wire, kDirection>;
  }
};

class CudaPacker final : public Packer {
 public:
  CudaPacker(PackerArguments arguments, const std::vector<SlotRange>& slots)
      : arguments_(arguments),
        dtype_(arguments.real_dtype()),
        element_bytes_(static_cast<int64_t>(c10::elementSize(dtype_))),
        offsets_bytes_(offsets_of(slots, element_bytes_)) {
    const c10::cuda::CUDAGuard guard(arguments_.device);
    upload_tables(slots);
  }

  void pack(std::span<const void* const> gradients, const at::Tensor& flat,
            double scale) override {
    arguments_.check("Packer::pack", gradients.size(), flat);
    void* const buffer = flat.mutable_data_ptr();
    const bool copies_bits = flat.scalar_type() == arguments_.gradient_dtype &&
                             !arguments_.changes_values(scale);
    if (copies_bits && all_in_place(gradients, buffer)) return;
    const at::ScalarType wire = c10::toRealValueType(flat.scalar_type());
    run(visit_pair(dtype_, wire, LauncherOf<Direction::kPack>()), gradients,
        buffer, scale);
  }

  void unpack(const at::Tensor& flat,
              std::span<void* const> gradients) override {
    arguments_.check("Packer::unpack", gradients.size(), flat);
    // The kernel only reads `flat`.
    void* const buffer = const_cast<void*>(flat.const_data_ptr());
    const std::span<const void* const> to(gradients.data(), gradients.size());
    if (flat.scalar_type() == arguments_.gradient_dtype &&
        all_in_place(to, buffer)) {
      return;
    }
    const at::ScalarType wire = c10::toRealValueType(flat.scalar_type());
    run(visit_pair(dtype_, wire, LauncherOf<Direction::kUnpack>()), to, buffer,
        1.0);
  }

 private:
  static std::vector<int64_t> offsets_of(const std::vector<SlotRange>& slots,
                                         int64_t element_bytes) {
    std::vector<int64_t> offsets;
    for (const SlotRange& slot : slots) {
      offsets.push_back(slot.offset_numel * element_bytes);
    }
    return offsets;
  }

  // One blocking copy, so that every stream sees the tables.
  void upload_tables(const std::vector<SlotRange>& slots) {
    std::vector<Place> places;
    for (const SlotRange& slot : slots) {
      places.push_back(
          {.begin = slot.offset_numel, .end = slot.offset_numel + slot.numel});
    }
    const int64_t numel = places.empty() ? 0 : places.back().end;
    const int64_t chunk_numel = kChunkBytes / element_bytes_;
    const int64_t num_chunks = (numel + chunk_numel - 1) / chunk_numel;
    std::vector<int32_t> first_in_chunk;
    size_t slot = 0;
    for (int64_t chunk = 0; chunk <= num_chunks; ++chunk) {
      while (slot < places.size() && places[slot].end <= chunk * chunk_numel) {
        ++slot;
      }
      first_in_chunk.push_back(static_cast<int32_t>(slot));
    }

    const size_t places_bytes = places.size() * sizeof(Place);
    const size_t first_bytes = first_in_chunk.size() * sizeof(int32_t);
    std::vector<std::byte> host(places_bytes + first_bytes);
    std::memcpy(host.data(), places.data(), places_bytes);
    std::memcpy(host.data() + places_bytes, first_in_chunk.data(), first_bytes);
    tables_memory_ =
        at::from_blob(host.data(), {static_cast<int64_t>(host.size())},
                      at::kByte)
            .to(arguments_.device);

    auto* const device =
        static_cast<std::byte*>(tables_memory_.mutable_data_ptr());
    tables_ = {.places = reinterpret_cast<const Place*>(device),
               .first_in_chunk =
                   reinterpret_cast<const int32_t*>(device + places_bytes),
               .num_slots = static_cast<int32_t>(places.size()),
               .flat_numel = numel};
  }

  bool all_in_place(std::span<const void* const> gradients,
                    const void* buffer) const {
    const auto* const base = static_cast<const std::byte*>(buffer);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i] != base + offsets_bytes_[i]) return false;
    }
    return true;
  }

  void run(Launcher launcher, std::span<const void* const> gradients,
           void* flat, double scale) {
    if (tables_.flat_numel == 0) return;
    const c10::cuda::CUDAGuard guard(arguments_.device);
    const c10::cuda::CUDAStream stream =
        c10::cuda::getCurrentCUDAStream(arguments_.device.index());
    // The allocator must not reuse the tables' memory before this stream is
    // done with it.
    c10::cuda::CUDACachingAllocator::recordStream(
        tables_memory_.storage().data_ptr(), stream);
    at::DataPtr on_device;
    if (gradients.size() > kMaxInlineSlots) {
      on_device = copy_to_device(gradients, stream);
    }
    launcher({.gradients = gradients,
              .tables = tables_,
              .flat = flat,
              .scale = scale,
              .on_device = static_cast<void* const*>(on_device.get()),
              .stream = stream});
  }

  // Constant after construction.
  const PackerArguments arguments_;
  const at::ScalarType dtype_;  // real
  const int64_t element_bytes_;
  const std::vector<int64_t> offsets_bytes_;  // by slot
  at::Tensor tables_memory_;                  // of tables_
  Tables tables_ = {};
};

}  // namespace

std::unique_ptr<Packer> make_cuda_packer(PackerArguments arguments,
                                         std::vector<SlotRange> slots) {
  return std::make_unique<CudaPacker>(arguments, slots);
}

}  // namespace brigade::packing
