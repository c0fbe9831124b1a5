// What a policy may do to the running iteration while the engine asks it
// something.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_MARKER_H_
#define BRIGADE_ENGINE_MARKER_H_

#include <cstddef>
#include <cstdint>

namespace brigade {

struct EngineState;

// What a gradient has completed.
struct Slot {
  uint32_t entry = 0;        // of the sequence
  bool has_gradient = true;  // false: it counts as ready without one
};

// For the time of a call.
class Marker {
 public:
  explicit Marker(EngineState& state) : state_(state) {}
  Marker(const Marker&) = delete;
  Marker& operator=(const Marker&) = delete;

  // The gradient of a variable, by number, is as ready as it will be. Packs the
  // entry if it was the last that this waits for. REQUIRES: it was not ready.
  void mark(size_t variable, Slot slot);

  // Launches what is ready, waits for the entries up to this one and delivers
  // them. REQUIRES: they are ready, and fail by the network only.
  void deliver_through(size_t entry);

 private:
  EngineState& state_;
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_MARKER_H_
