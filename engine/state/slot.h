// What a gradient has completed.

#ifndef BRIGADE_ENGINE_STATE_SLOT_H_
#define BRIGADE_ENGINE_STATE_SLOT_H_

#include <cstdint>

namespace brigade {

struct Slot {
  uint32_t entry = 0;        // of the sequence
  bool has_gradient = true;  // false: it counts as ready without one
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STATE_SLOT_H_
