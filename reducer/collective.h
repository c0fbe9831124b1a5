// One entry of the sequence of collectives that an iteration launches, in the
// same order on every rank: a bucket's all-reduce, say. And its failure.
//
// An entry decides what it carries, how it is launched and where the result
// goes. The engine decides when.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_COLLECTIVE_H_
#define BRIGADE_REDUCER_COLLECTIVE_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>

namespace brigade {

// When and where something happened, for messages.
struct Occasion {
  int64_t iteration = 0;
  int rank = 0;
};

// "iteration 17 on rank 2".
std::string describe(Occasion occasion);

class Collective {
 public:
  virtual ~Collective() = default;

  // Its index in timelines and messages. None: it has no line there, and its
  // result is not delivered at the end of the iteration: who needs it waits for
  // it.
  virtual std::optional<size_t> unit() const = 0;

  // The number of gradients, of all local replicas, that it waits for. 0: only
  // for its turn.
  virtual size_t num_awaited() const = 0;

  // It is left out of this iteration, on all ranks alike. Known once those
  // before it have been launched; may wait for one of them. Errors: what that
  // one throws.
  virtual bool is_left_out() = 0;

  // True if what it waits for is to be packed; known as is_left_out() is. One
  // without elements is left out and packed all the same.
  virtual bool needs_pack() = 0;

  // Fills what travels; called when all that it waits for is there, if it waits
  // for something. Errors: RuntimeError naming the gradient that does not fit.
  virtual void pack() = 0;

  // Null: nobody can wait for it by a future. Errors: what the collective or a
  // comm hook throws.
  virtual c10::intrusive_ptr<c10::ivalue::Future> launch() = 0;

  // One of the same kind and size, to which this rank contributes nothing, for
  // peers that wait for its share. Gradients are not touched. Errors: as
  // launch().
  virtual c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() = 0;

  // What the value of its future holds, to be given to deliver(); undefined:
  // nothing that would have to be handed over. Errors: TypeError, RuntimeError
  // if it does not fit.
  virtual at::Tensor result_of(const c10::IValue& value) = 0;

  // Gives what has arrived to those who wait for it; undefined also if nothing
  // travelled. REQUIRES: its future is complete, or there is none; one without
  // a unit waits for it here. Errors: what a collective throws that it waits
  // for, its own or one before it.
  virtual void deliver(const at::Tensor& result) = 0;

  // Of what it carries, and so of its result.
  virtual c10::Device device() const = 0;

  // Nothing but the network makes it fail, so that a failure is a peer's.
  virtual bool fails_by_network_only() const = 0;

  // "bucket 1 of 3 (parameter 4 ('head.weight'))".
  virtual std::string describe() const = 0;
};

enum class ErrorSource {
  kHook,      // thrown when the hook was called
  kFuture,    // held by the future that it returned
  kDelivery,  // of handing its value out as gradients
};

struct Failure {
  std::exception_ptr error;
  ErrorSource source = ErrorSource::kFuture;
  Collective* collective = nullptr;
  std::string where = {};  // describes it, which may be gone by then
};

// Of the exception that is being handled.
Failure failure_of(Occasion occasion, ErrorSource source,
                   Collective& collective);

// DistBackendError always is a peer's failure. Of a collective that only the
// network makes fail, so is all that is not a wrong value or type; of a user's
// hook, what its future holds and c10 does not know (Gloo's own exceptions).
bool is_peer_failure(const Failure& failure);

// Rethrows the error with its place in the text. c10's errors keep their type;
// others become a RuntimeError.
[[noreturn]] void rethrow_hook_error(const Failure& failure);

// "bucket 1 of 3 (parameter 4) in iteration 17 on rank 2".
std::string describe_place(const Collective& collective, Occasion occasion);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_COLLECTIVE_H_
