// Packer for devices without their own kernels.

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <vector>

#include "brigade/reducer/packing/packer.h"
#include "brigade/tests/reducer/packer_checks.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::all_wire_pairs;
using testing::awkward_slots;
using testing::expect_pack_as_aten;
using testing::expect_unpack_as_aten;
using testing::random_slots;

class GenericPackerTest : public simulated::StreamTest {};

TEST_F(GenericPackerTest, PacksAsAtenForEveryPair) {
  uint64_t seed = 100;
  for (auto [gradient, wire] : all_wire_pairs()) {
    for (const double scale : {1.0, 1.0 / 3, 0.25}) {
      expect_pack_as_aten({.gradient_dtype = gradient,
                           .wire_dtype = wire,
                           .slots = awkward_slots(),
                           .scale = scale,
                           .device = simulated::device()});
      expect_pack_as_aten(
          {.gradient_dtype = gradient,
           .wire_dtype = wire,
           .slots = random_slots(seed, 40, 600, gradient == wire),
           .scale = scale,
           .device = simulated::device(),
           .seed = seed});
      ++seed;
    }
  }
}

TEST_F(GenericPackerTest, UnpacksAsAtenForEveryPair) {
  for (auto [gradient, wire] : all_wire_pairs()) {
    expect_unpack_as_aten({.gradient_dtype = gradient,
                           .wire_dtype = wire,
                           .slots = awkward_slots(),
                           .device = simulated::device()});
  }
}

TEST_F(GenericPackerTest, UsesTheCurrentStream) {
  const c10::Stream side = simulated::new_stream();
  simulated::make_wait(side, simulated::default_stream());
  const c10::StreamGuard on_side(side);
  const at::Tensor gradient = at::ones({3}, simulated::on_device());
  const at::Tensor flat = at::zeros({5}, simulated::on_device());
  const auto packer = make_packer(simulated::device(), at::kFloat,
                                  {{.offset_numel = 1, .numel = 3}});
  const std::array<const void*, 1> from = {gradient.const_data_ptr()};
  packer->pack(from, flat, 2.0);
  EXPECT_EQ(flat.sum().item<double>(), 6);
}

}  // namespace
}  // namespace brigade
