// What an engine asks of whoever decides what is reduced.
//
// The engine knows which backward belongs to an iteration, what is ready, what
// is launched next, and how all ranks come to the same end. The policy knows
// what the entries of the sequence are, which gradients will not come, when the
// sequence changes, and every word that names a parameter.
//
// Variables go by their number where nothing else is said.
//
// Thread safety: none; called with the engine's lock held.

#ifndef BRIGADE_ENGINE_STATE_REDUCTION_POLICY_H_
#define BRIGADE_ENGINE_STATE_REDUCTION_POLICY_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/engine/state/collective.h"
#include "brigade/engine/state/occasion.h"
#include "brigade/engine/state/slot.h"
#include "brigade/planning/variable_index.h"

namespace brigade {

class RunningIteration;

// How an iteration ended.
enum class Outcome {
  kDelivered,       // well; on all ranks, unless on_end_refuted() follows
  kAborted,         // on no rank, and all know
  kDeliveryFailed,  // well on all ranks, but this one could not deliver
};

// What became of a change of the sequence.
enum class Replanned {
  kNotDue,
  kSameSequence,  // what was observed makes the same one
  kOtherSequence,
};

class ReductionPolicy {
 public:
  virtual ~ReductionPolicy() = default;

  // ---- The sequence. Equal on all ranks; valid until the policy changes it,
  // which it does where it is asked to only.

  virtual std::span<Collective* const> sequence() = 0;

  // Ranks compare it before they launch anything of a sequence.
  virtual uint64_t fingerprint() const = 0;

  // Beside the fingerprint in errors: "3 buckets, 8 parameters".
  virtual std::string describe_sequence() const = 0;

  // True if what is left out depends on the result of an entry, so that ranks
  // compare before the first launch of every iteration.
  virtual bool compares_each_iteration() const = 0;

  // Of the hook that launches the entries with a unit.
  virtual const HookTraits& hook_traits() const = 0;

  // ---- An iteration, in this order.

  // False: no backward brings gradients; nothing is prepared.
  virtual bool expects_gradients() const = 0;

  // Looks after the variables. Errors: what is wrong with them.
  virtual void check_variables() const = 0;

  // Calls a collective of the policy's own; `doing` is what for. If it fails
  // the group is lost.
  using CallCollective = std::function<void(
      std::string_view doing, const std::function<void()>& collective)>;

  // A change of the sequence that all ranks make at the same place. Another one
  // is equal on all ranks.
  virtual Replanned replan(const CallCollective& call) = 0;

  // An iteration is prepared. Returns whether the sequence is another one,
  // which peers may not have: ranks compare it.
  virtual bool before_iteration() = 0;

  virtual void on_prepared(std::span<const at::Tensor> outputs) = 0;

  // True if something can be launched once a backward goes through the outputs,
  // before any gradient has come.
  virtual bool begins_at_outputs() const = 0;

  // Marks what will not come. `is_shadow`: this rank contributes nothing, and
  // all entries will be launched as substitutes.
  virtual void on_backward_begins(RunningIteration& iteration,
                                  bool is_shadow) = 0;

  // A gradient has been accumulated that is not part of an iteration, or not
  // yet. `is_defined`: false if autograd brought an undefined one.
  virtual void on_local_gradient(VariableIndex variable, bool is_defined) = 0;

  // Where a gradient of the iteration goes; none: more parts of it are to come.
  virtual std::optional<Slot> on_gradient(VariableIndex variable,
                                          bool is_defined) = 0;

  // A backward of the iteration is over: marks what only its end tells.
  virtual void on_backward_ends(RunningIteration& iteration) = 0;

  // A backward that reached the outputs may bring no gradient at all.
  virtual bool may_end_without_gradients() const = 0;

  // The end of an iteration may make a change of the sequence due.
  virtual bool is_learning() const = 0;

  // All ranks have ended the iteration well: before its results are delivered,
  // or, if this one did not wait for the others, before the next is prepared.
  virtual void on_end_confirmed() = 0;

  // In place of that: it has been delivered here, and not on all ranks.
  virtual void on_end_refuted() = 0;

  // It is over on this rank. Also of one that ranks aborted before it began.
  // `is_shadow`: as on_backward_begins() was told. Must not throw unless all
  // was delivered.
  virtual void on_iteration_over(Outcome outcome, bool is_shadow) = 0;

  // ---- A peer is lost.

  // These may be written to for ever: goes on with other memory. What they held
  // is lost. Returns what must be kept until they are done.
  virtual std::shared_ptr<void> abandon(
      std::span<Collective* const> in_flight) = 0;

  // The same where nothing goes on: the engine is being destroyed.
  virtual std::shared_ptr<void> let_go() = 0;

  // ---- Words.

  // "parameters 3 ('head.bias') and 4".
  virtual std::string name_of(std::span<const size_t> variables) const = 0;

  // The iteration ended without these gradients, at this occasion.
  virtual std::string describe_missing(std::span<const size_t> variables,
                                       Occasion occasion) const = 0;

  // A gradient came when its iteration was over.
  virtual std::string describe_late(VariableIndex variable,
                                    Occasion occasion) const = 0;

  // A gradient came that was ready already. Throws RuntimeError.
  [[noreturn]] virtual void refuse(VariableIndex variable,
                                   Occasion occasion) const = 0;
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STATE_REDUCTION_POLICY_H_
