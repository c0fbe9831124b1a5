// Packer on a CUDA device: the checks of the CPU, and that the host never
// waits.

#include <ATen/ATen.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/cuda.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "brigade/reducer/packing/packer.h"
#include "brigade/tests/reducer/packer_checks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::all_wire_pairs;
using testing::awkward_slots;
using testing::expect_pack_as_aten;
using testing::expect_unpack_as_aten;
using testing::PackerCase;
using testing::PackerSlot;
using testing::random_slots;
using testing::Source;

// More than a kernel's arguments can hold.
constexpr int64_t kManySlots = 700;

class PackerGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
    try {
      make_packer(device(), at::kFloat, {{0, 1}});
    } catch (const c10::ValueError&) {
      throw;
    } catch (const c10::Error& error) {
      GTEST_SKIP() << error.what_without_backtrace();
    }
  }

  static at::Device device() { return at::Device(at::kCUDA, 0); }

  static c10::impl::VirtualGuardImpl runtime() {
    return c10::impl::VirtualGuardImpl(at::kCUDA);
  }

  static void expect_as_aten(PackerCase packer_case) {
    packer_case.device = device();
    expect_pack_as_aten(packer_case);
    expect_unpack_as_aten(packer_case);
  }
};

// Equal slots of ones, and the bucket for them.
struct Bucket {
  Bucket(at::Device device, int64_t num_slots, int64_t numel)
      : gradients(at::ones({num_slots * numel}, device)),
        flat(at::zeros({num_slots * numel}, device)) {
    std::vector<SlotRange> slots;
    for (int64_t i = 0; i < num_slots; ++i) {
      slots.push_back({.offset_numel = i * numel, .numel = numel});
      to.push_back(gradients.data_ptr<float>() + i * numel);
    }
    from.assign(to.begin(), to.end());
    packer = make_packer(device, at::kFloat, slots);
  }

  at::Tensor gradients;  // 1D, [num_slots * numel]
  at::Tensor flat;       // 1D, [num_slots * numel]
  std::vector<void*> to;
  std::vector<const void*> from;
  std::unique_ptr<Packer> packer;
};

TEST_F(PackerGpuTest, MovesAwkwardSizesAsAtenForEveryPair) {
  for (auto [gradient, wire] : all_wire_pairs()) {
    for (double scale : {1.0, 1.0 / 3}) {
      expect_as_aten({.gradient_dtype = gradient,
                      .wire_dtype = wire,
                      .slots = awkward_slots(),
                      .scale = scale});
    }
  }
}

TEST_F(PackerGpuTest, MovesSlotsOfManyChunksAsAten) {
  for (auto [gradient, wire] : all_wire_pairs()) {
    const Source in_place =
        gradient == wire ? Source::kInPlace : Source::kSeparate;
    const std::vector<PackerSlot> slots = {
        {.numel = 100'000},
        {.gap = 8, .numel = 100'000, .source = Source::kMissing},
        {.numel = 100'001, .misalignment = 1},
        {.numel = 64},
        {.numel = 100'000, .source = in_place},
        {.gap = 3, .numel = 70'001}};
    for (double scale : {1.0, 1.0 / 3}) {
      expect_as_aten({.gradient_dtype = gradient,
                      .wire_dtype = wire,
                      .slots = slots,
                      .scale = scale});
    }
  }
}

TEST_F(PackerGpuTest, MovesRandomSlotsAsAtenWithAndWithoutStaging) {
  uint64_t seed = 0;
  for (auto [gradient, wire] : all_wire_pairs()) {
    for (int64_t num_slots : {int64_t{60}, int64_t{480}, kManySlots}) {
      expect_as_aten(
          {.gradient_dtype = gradient,
           .wire_dtype = wire,
           .slots = random_slots(seed, num_slots, 500, gradient == wire),
           .scale = 1.0 / 3,
           .seed = seed});
      ++seed;
    }
  }
}

// The addresses of two buckets alternate in the staging memory. If it were
// overwritten too early, values would be wrong.
TEST_F(PackerGpuTest, ConcurrentMovesKeepTheirAddresses) {
  Bucket a(device(), kManySlots, 256);
  const Bucket b(device(), kManySlots, 256);
  for (int i = 0; i < 100; ++i) {
    a.packer->pack(a.from, a.flat, 2.0);
    a.packer->pack(b.from, b.flat, 0.5);
    a.packer->unpack(a.flat, a.to);
    a.packer->unpack(b.flat, b.to);
  }
  EXPECT_TRUE(at::all(a.gradients.eq(std::exp2(100.0))).item<bool>());
  EXPECT_TRUE(at::all(b.gradients.eq(std::exp2(-100.0))).item<bool>());
}

TEST_F(PackerGpuTest, WorksOnTheCurrentStream) {
  Bucket bucket(device(), kManySlots, 64);
  const c10::Stream before = runtime().getStream(device());
  before.synchronize();
  for (int i = 0; i < 3; ++i) {
    const c10::Stream side = runtime().getNewStream(device());
    const c10::StreamGuard guard(side);
    bucket.gradients.fill_(4.0F * static_cast<float>(i + 1));
    bucket.packer->pack(bucket.from, bucket.flat, 0.25);
    const at::Tensor sum = bucket.flat.sum();
    EXPECT_EQ(sum.item<float>(), static_cast<float>((i + 1) * kManySlots * 64));
    side.synchronize();
  }
}

TEST_F(PackerGpuTest, NeverWaitsForTheDevice) {
  for (int64_t num_slots : {int64_t{8}, kManySlots}) {
    Bucket bucket(device(), num_slots, 64);
    const at::Tensor matrix = at::ones({8192, 8192}, device());
    at::Tensor product = at::empty_like(matrix);
    // A kernel's first launch loads it, which may wait.
    at::mm_out(product, matrix, matrix);
    bucket.packer->pack(bucket.from, bucket.flat, 1.0 / 3);
    bucket.packer->unpack(bucket.flat, bucket.to);
    bucket.gradients.fill_(1.0);
    const c10::Stream stream = runtime().getStream(device());
    stream.synchronize();
    // Seconds of work before the packer's.
    for (int i = 0; i < 60; ++i) at::mm_out(product, matrix, matrix);
    ASSERT_FALSE(stream.query());
    bucket.packer->pack(bucket.from, bucket.flat, 0.5);
    bucket.packer->unpack(bucket.flat, bucket.to);
    EXPECT_FALSE(stream.query()) << num_slots << " slots";
    EXPECT_TRUE(at::all(bucket.gradients.eq(0.5)).item<bool>());
  }
}

TEST_F(PackerGpuTest, MayBeDestroyedBeforeItsWorkIsDone) {
  Bucket bucket(device(), kManySlots, 1024);
  bucket.packer->pack(bucket.from, bucket.flat, 0.5);
  bucket.packer.reset();
  EXPECT_TRUE(at::all(bucket.flat.eq(0.5)).item<bool>());
}

TEST_F(PackerGpuTest, RejectsABufferOnAnotherDevice) {
  const Bucket bucket(device(), 1, 4);
  EXPECT_THROW(bucket.packer->pack(bucket.from, at::zeros({4}), 1.0),
               c10::ValueError);
}

}  // namespace
}  // namespace brigade
