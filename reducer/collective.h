// One entry of the sequence of collectives that an iteration launches, in the
// same order on every rank: a bucket, or the sum of the used map.
//
// Decides how it is launched, and with what. Whoever holds the sequence decides
// when.
//
// Thread safety: none; the reducer's lock covers it.

#ifndef BRIGADE_REDUCER_COLLECTIVE_H_
#define BRIGADE_REDUCER_COLLECTIVE_H_

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <optional>
#include <string>

namespace brigade {

class Collective {
 public:
  virtual ~Collective() = default;

  // Its index among the buckets of the plan. None: whoever needs its result
  // waits for that.
  virtual std::optional<size_t> bucket() const = 0;

  // Of all local replicas, that it waits for; 0: only for its turn.
  virtual size_t num_gradients() const = 0;

  // It is left out of this iteration, on all ranks alike. Known once those
  // before it have been launched; may wait for one of them. Errors: what that
  // one throws.
  virtual bool is_left_out() = 0;

  // Null: nobody can wait for it by a future. Errors: what the collective or a
  // comm hook throws.
  virtual c10::intrusive_ptr<c10::ivalue::Future> launch() = 0;

  // One of the same kind and size, to which this rank contributes nothing, for
  // peers that wait for its share. Gradients are not touched. Errors: as
  // launch().
  virtual c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() = 0;

  // Of what it carries, and so of its result.
  virtual c10::Device device() const = 0;

  // Nothing but the network makes it fail, so that a failure is a peer's.
  virtual bool fails_by_network_only() const = 0;

  // "bucket 1 of 3 (parameter 4 ('head.weight'))".
  virtual std::string describe() const = 0;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_COLLECTIVE_H_
