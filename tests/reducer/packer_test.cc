#include "brigade/reducer/packing/packer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <array>
#include <vector>

#include "brigade/tests/reducer/packer_checks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace packer_test {

using testing::all_wire_pairs;
using testing::awkward_slots;
using testing::expect_pack_as_aten;
using testing::expect_unpack_as_aten;
using testing::expected_on_wire;
using testing::PackerCase;
using testing::PackerSlot;
using testing::random_slots;
using testing::same_bits;
using testing::Source;

constexpr std::array kScales = {1.0, 1.0 / 3, 0.25, -1e-3};

// Sets the number of threads for one test.
class ThreadsScope {
 public:
  explicit ThreadsScope(int num_threads) { at::set_num_threads(num_threads); }
  ~ThreadsScope() { at::set_num_threads(before_); }

 private:
  const int before_ = at::get_num_threads();
};

TEST(PackerTest, PacksAndUnpacksEveryPairAsAten) {
  uint64_t seed = 100;
  for (auto [gradient, wire] : all_wire_pairs()) {
    for (double scale : kScales) {
      for (const auto& slots :
           {awkward_slots(), random_slots(seed, 60, 600, gradient == wire)}) {
        const PackerCase packer_case = {.gradient_dtype = gradient,
                                        .wire_dtype = wire,
                                        .slots = slots,
                                        .scale = scale,
                                        .seed = seed};
        expect_pack_as_aten(packer_case);
        expect_unpack_as_aten(packer_case);
      }
      ++seed;
    }
  }
}

TEST(PackerTest, RoundsEveryFloat16AndBfloat16NeighbourhoodToEven) {
  // All upper halves of a float32, with lower halves at ties and next to them.
  const at::Tensor upper =
      at::arange(-32768, 32768, at::kInt).mul(65536).unsqueeze(1);
  const at::Tensor lower =
      at::tensor({0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000,
                  0x8001, 0xefff, 0xf000, 0xffff},
                 at::kInt)
          .unsqueeze(0);
  const at::Tensor gradient = upper.add(lower).view(at::kFloat).reshape({-1});
  auto packer = make_packer(at::kCPU, at::kFloat, {{0, gradient.numel()}});
  for (auto wire : {at::kHalf, at::kBFloat16, at::kFloat}) {
    for (double scale : {1.0, 0.5, 3.0}) {
      at::Tensor flat = at::empty({gradient.numel()}, wire);
      packer->pack(std::array{gradient.const_data_ptr()}, flat, scale);
      EXPECT_TRUE(same_bits(flat, expected_on_wire(gradient, scale, wire)))
          << wire << " times " << scale;
    }
  }
}

TEST(PackerTest, WidensEveryFloat16AndBfloat16Exactly) {
  const at::Tensor bits = at::arange(-32768, 32768, at::kInt).to(at::kShort);
  for (auto wire : {at::kHalf, at::kBFloat16}) {
    for (auto gradient : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      auto packer = make_packer(at::kCPU, gradient, {{0, bits.numel()}});
      at::Tensor result = at::empty({bits.numel()}, gradient);
      packer->unpack(bits.view(wire), std::array{result.mutable_data_ptr()});
      EXPECT_TRUE(same_bits(result, bits.view(wire).to(gradient)))
          << wire << " to " << gradient;
    }
  }
}

TEST(PackerTest, PortableAndNativeLoopsGiveTheSameBits) {
  for (auto [gradient, wire] : all_wire_pairs()) {
    if (c10::isComplexType(gradient)) continue;
    const packing::PackLoops native =
        packing::native_pack_loops(gradient, wire);
    if (native.pack == nullptr) {
      GTEST_SKIP() << "this processor has no native loops";
    }
    const packing::PackLoops portable =
        packing::portable_pack_loops(gradient, wire);
    const std::vector<SlotRange> slots = {{1, 1000}, {1001, 13}, {1014, 2}};
    const at::Tensor values =
        testing::values_of_every_kind(1000, gradient, /*seed=*/5);
    const std::array from = {values.const_data_ptr(), values.const_data_ptr(),
                             static_cast<const void*>(nullptr)};
    at::Tensor a = at::zeros({1017}, wire);
    at::Tensor b = at::zeros({1017}, wire);
    native.pack(slots, from.data(), a.mutable_data_ptr(), 0.3);
    portable.pack(slots, from.data(), b.mutable_data_ptr(), 0.3);
    EXPECT_TRUE(same_bits(a, b)) << gradient << " as " << wire;

    at::Tensor x = at::zeros({1000}, gradient);
    at::Tensor y = at::zeros({1000}, gradient);
    const std::array to_x = {x.mutable_data_ptr(), static_cast<void*>(nullptr),
                             static_cast<void*>(nullptr)};
    const std::array to_y = {y.mutable_data_ptr(), static_cast<void*>(nullptr),
                             static_cast<void*>(nullptr)};
    native.unpack(slots, a.const_data_ptr(), to_x.data());
    portable.unpack(slots, a.const_data_ptr(), to_y.data());
    EXPECT_TRUE(same_bits(x, y)) << wire << " to " << gradient;
  }
}

TEST(PackerTest, ScaleOfOneKeepsTheBitsOfNan) {
  const at::Tensor bits =
      at::tensor({0x7f800001, 0x7fc12345, -1, 0x7fa00000, 5}, at::kInt);
  at::Tensor flat = at::zeros({5}, at::kInt);
  auto packer = make_packer(at::kCPU, at::kFloat, {{0, 5}});
  packer->pack(std::array{bits.const_data_ptr()}, flat.view(at::kFloat), 1.0);
  EXPECT_TRUE(flat.equal(bits));
  flat.zero_();
  packer->unpack(bits.view(at::kFloat), std::array{flat.mutable_data_ptr()});
  EXPECT_TRUE(flat.equal(bits));
}

TEST(PackerTest, LargeSlotsOnManyThreadsHaveTheSameBits) {
  const ThreadsScope threads(3);
  const std::vector<PackerSlot> slots = {
      {.numel = 3},
      {.numel = 300'001},
      {.gap = 1, .numel = 17},
      {.numel = 300'000, .source = Source::kInPlace},
      {.numel = 300'000, .source = Source::kMissing},
      {.numel = 300'000, .misalignment = 1},
      {.numel = 5}};
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kComplexFloat}) {
    for (double scale : {1.0, 1.0 / 3}) {
      expect_pack_as_aten({.gradient_dtype = dtype,
                           .wire_dtype = dtype,
                           .slots = slots,
                           .scale = scale});
    }
  }
}

TEST(PackerTest, RejectsDtypesAndDevices) {
  for (const auto& dtype : {at::kLong, at::kBool}) {
    EXPECT_THROW(make_packer(at::kCPU, dtype, {{0, 1}}), c10::ValueError);
  }
  EXPECT_THROW(make_packer(at::kMeta, at::kFloat, {{0, 1}}), c10::ValueError);
}

TEST(PackerTest, RejectsUnsuitableBuffers) {
  auto packer = make_packer(at::kCPU, at::kFloat, {{0, 4}, {4, 2}});
  const at::Tensor gradient = at::ones({4});
  const std::array from = {gradient.const_data_ptr(),
                           gradient.const_data_ptr()};
  const std::array to = {gradient.mutable_data_ptr(),
                         gradient.mutable_data_ptr()};
  for (const at::Tensor& flat :
       {at::zeros({5}), at::zeros({12}).slice(0, 0, 12, 2),
        at::zeros({6}, at::kDouble), at::zeros({6}, at::kLong),
        at::zeros({6}, at::kMeta), at::Tensor()}) {
    EXPECT_THROW(packer->pack(from, flat, 1.0), c10::ValueError);
    EXPECT_THROW(packer->unpack(flat, to), c10::ValueError);
  }
  EXPECT_THROW(packer->pack(std::span(from).first(1), at::zeros({6}), 1.0),
               c10::ValueError);
  EXPECT_TRUE(gradient.equal(at::ones({4})));
}

}  // namespace packer_test
}  // namespace brigade
