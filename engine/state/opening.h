// What an owner launches in front of a forward, on the group of all ranks,
// before it is known how the last iteration has ended: a broadcast of buffers.
// It belongs to no iteration. A rank that has failed launches it for its peers
// (Engine::open()).
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_STATE_OPENING_H_
#define BRIGADE_ENGINE_STATE_OPENING_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace brigade {

class Opening {
 public:
  virtual ~Opening() = default;

  // A digest of what peers must launch to take part in it.
  virtual uint64_t form() const = 0;

  // Errors: what a collective throws.
  virtual void launch() = 0;

  // The same collectives, of which this rank wants nothing. Nothing that the
  // user sees is written to. Errors: as launch().
  virtual void launch_for_peers() = 0;

  // Its launch returns when peers have launched theirs.
  virtual bool keeps_host_waiting() const = 0;

  // Of what it carries; the CPU's if some of that is there.
  virtual c10::Device device() const = 0;

  // "broadcasting 3 buffers from rank 0".
  virtual std::string describe() const = 0;
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STATE_OPENING_H_
