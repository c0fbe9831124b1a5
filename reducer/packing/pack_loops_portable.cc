#include "brigade/reducer/packing/pack_loops.h"
#include "brigade/reducer/packing/slot_loops.h"

namespace brigade {
namespace {

template <typename Gradient, typename Wire>
void pack(std::span<const SlotRange> slots, const void* const* gradients,
          void* flat, double scale) {
  pack_slots<Gradient, Wire>(slots, gradients, flat, scale, PlainTransfer());
}

template <typename Gradient, typename Wire>
void unpack(std::span<const SlotRange> slots, const void* flat,
            void* const* gradients) {
  unpack_slots<Gradient, Wire>(slots, flat, gradients, PlainTransfer());
}

}  // namespace

PackLoops portable_pack_loops(at::ScalarType gradient, at::ScalarType wire) {
  return visit_pair(gradient, wire, []<typename Gradient, typename Wire>() {
    return PackLoops{.pack = pack<Gradient, Wire>,
                     .unpack = unpack<Gradient, Wire>};
  });
}

}  // namespace brigade
