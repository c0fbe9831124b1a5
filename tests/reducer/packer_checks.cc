#include "brigade/tests/reducer/packer_checks.h"

#include <ATen/CPUGeneratorImpl.h>

#include <random>

#include "brigade/reducer/packing/packer.h"
#include "gtest/gtest.h"

namespace brigade::testing {
namespace {

constexpr double kUntouched = 7.0;

at::ScalarType bits_dtype(at::ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

at::Tensor as_reals(const at::Tensor& x) {
  return x.is_complex() ? at::view_as_real(x) : x;
}

// Arguments of a packer: a flat buffer, and one gradient per slot.
struct Scene {
  explicit Scene(const PackerCase& packer_case) {
    int64_t offset = 0;
    for (const PackerSlot& slot : packer_case.slots) {
      offset += slot.gap;
      ranges.push_back({.offset_numel = offset, .numel = slot.numel});
      offset += slot.numel;
    }
    flat =
        at::full({offset + 3}, kUntouched,
                 at::device(packer_case.device).dtype(packer_case.wire_dtype));
    for (size_t i = 0; i < ranges.size(); ++i) {
      gradients.push_back(make_gradient(packer_case, i));
    }
  }

  at::Tensor view(const at::Tensor& buffer, size_t slot) const {
    return buffer.narrow(0, ranges[slot].offset_numel, ranges[slot].numel);
  }

  std::vector<void*> addresses() const {
    std::vector<void*> result;
    for (size_t i = 0; i < gradients.size(); ++i) {
      // A tensor without elements may have no address of its own.
      result.push_back(gradients[i].defined() ? gradients[i].mutable_data_ptr()
                                              : nullptr);
    }
    return result;
  }

  std::vector<SlotRange> ranges;
  at::Tensor flat;                    // 1D, [numel]
  std::vector<at::Tensor> gradients;  // by slot, 1D; undefined: missing

 private:
  at::Tensor make_gradient(const PackerCase& packer_case, size_t i) const {
    const PackerSlot& slot = packer_case.slots[i];
    if (slot.source == Source::kMissing) return {};
    const at::Tensor values =
        values_of_every_kind(slot.numel, packer_case.gradient_dtype,
                             packer_case.seed + i)
            .to(packer_case.device);
    at::Tensor gradient =
        slot.source == Source::kInPlace
            ? view(flat, i)
            : at::empty({slot.numel + slot.misalignment}, values.options())
                  .narrow(0, slot.misalignment, slot.numel);
    gradient.copy_(values);
    return gradient;
  }
};

void expect_same(const PackerCase& packer_case, const Scene& scene, size_t slot,
                 const at::Tensor& found, const at::Tensor& expected) {
  if (same_bits(found, expected)) return;
  const at::Tensor a = as_reals(found).reshape({-1}).cpu();
  const at::Tensor b = as_reals(expected).reshape({-1}).cpu();
  for (int64_t k = 0; k < a.numel(); ++k) {
    if (same_bits(a[k], b[k])) continue;
    ADD_FAILURE() << packer_case << ": slot " << slot << " (offset "
                  << scene.ranges[slot].offset_numel << ", numel "
                  << scene.ranges[slot].numel << ") differs first at real " << k
                  << ": expected " << b[k].item<double>() << ", found "
                  << a[k].item<double>();
    return;
  }
}

void expect_gaps_untouched(const PackerCase& packer_case, const Scene& scene) {
  at::Tensor outside = at::ones({scene.flat.numel()}, at::kBool);
  for (const SlotRange& range : scene.ranges) {
    outside.narrow(0, range.offset_numel, range.numel).fill_(false);
  }
  const at::Tensor left = as_reals(scene.flat.cpu().masked_select(outside));
  const at::Tensor reals = scene.flat.is_complex() ? left.select(-1, 0) : left;
  EXPECT_TRUE(at::all(reals.eq(kUntouched)).item<bool>()) << packer_case;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const PackerCase& packer_case) {
  return out << packer_case.gradient_dtype << " as " << packer_case.wire_dtype
             << " times " << packer_case.scale << " on " << packer_case.device
             << ", seed " << packer_case.seed;
}

std::vector<std::pair<at::ScalarType, at::ScalarType>> all_wire_pairs() {
  std::vector<std::pair<at::ScalarType, at::ScalarType>> pairs = {
      {at::kDouble, at::kDouble},
      {at::kComplexFloat, at::kComplexFloat},
      {at::kComplexDouble, at::kComplexDouble}};
  for (auto gradient : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    for (auto wire : {at::kFloat, at::kHalf, at::kBFloat16}) {
      pairs.emplace_back(gradient, wire);
    }
  }
  return pairs;
}

std::vector<PackerSlot> awkward_slots() {
  std::vector<PackerSlot> slots;
  for (int64_t gap : {0, 1, 5}) {
    for (int64_t numel : {4097, 0, 1, 7, 8, 31, 0, 64, 1000}) {
      slots.push_back({.gap = gap, .numel = numel, .misalignment = gap % 4});
    }
  }
  return slots;
}

std::vector<PackerSlot> random_slots(uint64_t seed, int64_t count,
                                     int64_t max_numel, bool may_be_in_place) {
  std::mt19937_64 random(seed);
  auto up_to = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n + 1));
  };
  std::vector<PackerSlot> slots;
  for (int64_t i = 0; i < count; ++i) {
    PackerSlot slot;
    slot.gap = up_to(3) == 0 ? up_to(9) : 0;
    slot.numel = up_to(2) == 0 ? up_to(max_numel) : up_to(20);
    slot.misalignment = up_to(3) == 0 ? up_to(7) : 0;
    const int64_t kind = up_to(9);
    if (kind == 0) slot.source = Source::kMissing;
    if (kind == 1 && may_be_in_place) slot.source = Source::kInPlace;
    slots.push_back(slot);
  }
  return slots;
}

at::Tensor values_of_every_kind(int64_t numel, at::ScalarType dtype,
                                uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  const bool is_complex = c10::isComplexType(dtype);
  const at::ScalarType real = c10::toRealValueType(dtype);
  const int64_t num_reals = is_complex ? 2 * numel : numel;

  at::Tensor values = at::randn({num_reals}, generator).to(real);
  // Every third: random bits, which include infinity, NaN, denormals and -0.
  at::Tensor bits = at::empty({num_reals}, bits_dtype(real));
  if (real == at::kDouble) {
    // Around the range of float32 and float16.
    bits = (at::randn({num_reals}, generator, at::kDouble) * 150)
               .exp2()
               .view(at::kLong);
    bits += at::randint(1 << 30, {num_reals}, generator, at::kLong);
  } else if (real == at::kFloat) {
    bits.random_(std::numeric_limits<int32_t>::min(),
                 std::numeric_limits<int32_t>::max(), generator);
  } else {
    bits.random_(std::numeric_limits<int16_t>::min(),
                 std::numeric_limits<int16_t>::max(), generator);
  }
  const at::Tensor index = at::arange(num_reals);
  values = at::where(index.remainder(3).eq(1), bits.view(real), values);
  // Every 17th: near the middle of two adjacent float16 or bfloat16 values.
  const at::Tensor halfway =
      (1 + at::randint(4096, {num_reals}, generator) / 4096.)
          .mul(at::randint(-26, 17, {num_reals}, generator).exp2())
          .to(real);
  values = at::where(index.remainder(17).eq(2), halfway, values);
  return is_complex ? at::view_as_complex(values.reshape({numel, 2})) : values;
}

at::Tensor expected_on_wire(const at::Tensor& gradient, double scale,
                            at::ScalarType wire_dtype) {
  if (gradient.is_complex()) {
    return at::view_as_complex(at::view_as_real(gradient).mul(scale));
  }
  const bool is_narrow = gradient.scalar_type() == at::kHalf ||
                         gradient.scalar_type() == at::kBFloat16;
  const at::Tensor wide = is_narrow ? gradient.to(at::kFloat) : gradient;
  return at::mul(wide, scale).to(wire_dtype);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = as_reals(a).contiguous();
  const at::Tensor y = as_reals(b).contiguous();
  if (x.scalar_type() != y.scalar_type() || x.sizes() != y.sizes())
    return false;
  const at::ScalarType bits = bits_dtype(x.scalar_type());
  const at::Tensor both_nan = x.isnan().logical_and(y.isnan());
  return at::all(x.view(bits).eq(y.view(bits)).logical_or(both_nan))
      .item<bool>();
}

void expect_pack_as_aten(const PackerCase& packer_case) {
  const Scene scene(packer_case);
  std::vector<at::Tensor> expected;
  for (size_t i = 0; i < scene.gradients.size(); ++i) {
    expected.push_back(
        scene.gradients[i].defined()
            ? expected_on_wire(scene.gradients[i], packer_case.scale,
                               packer_case.wire_dtype)
            : at::zeros({scene.ranges[i].numel}, scene.flat.options()));
  }
  auto packer =
      make_packer(packer_case.device, packer_case.gradient_dtype, scene.ranges);
  const std::vector<void*> addresses = scene.addresses();
  const std::vector<const void*> from(addresses.begin(), addresses.end());
  packer->pack(from, scene.flat, packer_case.scale);
  for (size_t i = 0; i < scene.gradients.size(); ++i) {
    expect_same(packer_case, scene, i, scene.view(scene.flat, i), expected[i]);
  }
  expect_gaps_untouched(packer_case, scene);
}

void expect_unpack_as_aten(const PackerCase& packer_case) {
  Scene scene(packer_case);
  const at::Tensor sent = values_of_every_kind(
      scene.flat.numel(), packer_case.wire_dtype, packer_case.seed + 1000);
  scene.flat.copy_(sent);
  auto packer =
      make_packer(packer_case.device, packer_case.gradient_dtype, scene.ranges);
  packer->unpack(scene.flat, scene.addresses());
  for (size_t i = 0; i < scene.gradients.size(); ++i) {
    if (!scene.gradients[i].defined()) continue;
    expect_same(packer_case, scene, i, scene.gradients[i],
                scene.view(scene.flat, i).to(packer_case.gradient_dtype));
  }
  EXPECT_TRUE(same_bits(scene.flat.cpu(), sent)) << packer_case;
}

}  // namespace brigade::testing
