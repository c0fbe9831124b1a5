// One entry of the sequence of collectives that an iteration launches, in the
// same order on every rank, such as a bucket's all-reduce. And its failure.
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

  // Its index in timelines and messages. None: it is in neither, and deliver()
  // is not called at the end of the iteration.
  virtual std::optional<size_t> unit() const = 0;

  // The number of gradients, of all local replicas, that it waits for.
  virtual size_t num_awaited() const = 0;

  // It is left out of this iteration, on all ranks. Known once the entries
  // before it have been launched; may wait for one of them, and throw its
  // error.
  virtual bool is_left_out() = 0;

  // True if its gradients are to be packed; known as is_left_out() is. One
  // without elements is left out and packed all the same.
  virtual bool needs_pack() = 0;

  // Fills its buffer, when all its gradients are ready. Errors: RuntimeError
  // naming the gradient that does not fit.
  virtual void pack() = 0;

  // Null: it has no future. Errors: those of the collective or comm hook.
  virtual c10::intrusive_ptr<c10::ivalue::Future> launch() = 0;

  // The same on zeros, for peers that wait for this rank's share. Gradients are
  // not touched. Errors: as launch().
  virtual c10::intrusive_ptr<c10::ivalue::Future> launch_substitute() = 0;

  // The tensor in its future's value, for deliver(); undefined: none. Errors:
  // TypeError, RuntimeError if it does not fit.
  virtual at::Tensor result_of(const c10::IValue& value) = 0;

  // Makes the result gradients; undefined also if nothing travelled. REQUIRES:
  // its future is complete, or there is none; one without a unit waits for it
  // here. Errors: those of a collective that it waits for.
  virtual void deliver(const at::Tensor& result) = 0;

  virtual c10::Device device() const = 0;

  // No code of a user's makes it fail: a failure is a peer's.
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

// DistBackendError is a peer's failure. For a collective that fails by the
// network only, so is every error but a wrong value or type; for a user's hook,
// an error in its future that is not c10's (Gloo's own exceptions).
bool is_peer_failure(const Failure& failure);

// Rethrows the error with its place in the text. c10's errors keep their type;
// others become a RuntimeError.
[[noreturn]] void rethrow_hook_error(const Failure& failure);

// "bucket 1 of 3 (parameter 4) in iteration 17 on rank 2".
std::string describe_place(const Collective& collective, Occasion occasion);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_COLLECTIVE_H_
