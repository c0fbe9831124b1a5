// The CPU's inner loops: all slots of a bucket in one call, so that a tiny slot
// costs nanoseconds.  Decides how elements are loaded, scaled, cast and stored;
// threads, checks and complex numbers are packer_cpu.cc's business.
//
// Every loop here gives the same bits: a processor's own loops are only faster
// (NaN excepted: its payload may differ).

#ifndef BRIGADE_REDUCER_PACKING_PACK_LOOPS_H_
#define BRIGADE_REDUCER_PACKING_PACK_LOOPS_H_

#include <c10/core/ScalarType.h>

#include <span>

#include "brigade/reducer/packing/packer.h"

namespace brigade {

// As Packer::pack and unpack; `flat` is the first element of the buffer.
using PackLoop = void (*)(std::span<const SlotRange> slots,
                          const void* const* gradients, void* flat,
                          double scale);
using UnpackLoop = void (*)(std::span<const SlotRange> slots, const void* flat,
                            void* const* gradients);

// Null where there is no loop for the dtypes.
struct PackLoops {
  PackLoop pack = nullptr;
  UnpackLoop unpack = nullptr;
};

// Plain C++.  For all real pairs of dtypes in the table in packer.h.
PackLoops portable_pack_loops(at::ScalarType gradient, at::ScalarType wire);

// Loops for this processor, chosen at run time; nulls where there are none.
PackLoops native_pack_loops(at::ScalarType gradient, at::ScalarType wire);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PACKING_PACK_LOOPS_H_
