// Checks of a packer against ATen, for every device.

#ifndef BRIGADE_TESTS_REDUCER_PACKER_CHECKS_H_
#define BRIGADE_TESTS_REDUCER_PACKER_CHECKS_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "brigade/reducer/packing/packer.h"

namespace brigade::testing {

enum class Source { kSeparate, kMissing, kInPlace };

struct PackerSlot {
  int64_t gap = 0;  // elements before the slot that belong to none
  int64_t numel = 0;
  Source source = Source::kSeparate;
  int64_t misalignment = 0;  // elements from an aligned address
};

struct PackerCase {
  at::ScalarType gradient_dtype = at::kFloat;
  at::ScalarType wire_dtype = at::kFloat;
  std::vector<PackerSlot> slots = {};
  double scale = 1.0;
  at::Device device = at::kCPU;
  uint64_t seed = 0;
};

std::ostream& operator<<(std::ostream& out, const PackerCase& packer_case);

// Every pair of the table in packer.h.
std::vector<std::pair<at::ScalarType, at::ScalarType>> all_wire_pairs();

// Sizes and gaps around the vector width of loops.
std::vector<PackerSlot> awkward_slots();

// Returns `count` slots of random sizes up to `max_numel`, gaps and
// misalignments. Some are missing; some are in place if `may_be_in_place`.
std::vector<PackerSlot> random_slots(uint64_t seed, int64_t count,
                                     int64_t max_numel, bool may_be_in_place);

// Returns random values and all kinds of bit patterns; 1D, [numel].
at::Tensor values_of_every_kind(int64_t numel, at::ScalarType dtype,
                                uint64_t seed);

// Returns the products that packer.h specifies, in the wire dtype.
at::Tensor expected_on_wire(const at::Tensor& gradient, double scale,
                            at::ScalarType wire_dtype);

// True if the bits are equal; any NaN equals any other.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

// Fails the current test if an element differs from ATen's, or an element
// outside of all slots has changed.
void expect_pack_as_aten(const PackerCase& packer_case);
void expect_unpack_as_aten(const PackerCase& packer_case);

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_REDUCER_PACKER_CHECKS_H_
