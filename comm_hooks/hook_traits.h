// What a comm hook can do beside moving buckets: classes that it may derive
// from, and its answers, asked once, when it is set.
//
// Thread safety: const methods are as those of the hook.

#ifndef BRIGADE_COMM_HOOKS_HOOK_TRAITS_H_
#define BRIGADE_COMM_HOOKS_HOOK_TRAITS_H_

#include <c10/core/ScalarType.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace brigade {

class HostSums;

struct WireFormat {
  at::ScalarType dtype;  // of the buffer that travels
  double scale = 1.0;    // multiplies every gradient before the cast

  friend bool operator==(const WireFormat&, const WireFormat&) = default;
};

// A built-in hook that says what it wants to find in a bucket's buffer:
// gradients that are scaled and cast already, which the reducer folds into the
// one pass that packs the bucket. Other hooks get raw gradients in the
// parameters' dtype and average by themselves.
class DeclaresWireFormat {
 public:
  // The format for gradients of `gradient_dtype`. The dtype is asked for once,
  // the scale for every bucket of every iteration.
  virtual WireFormat wire_format(at::ScalarType gradient_dtype) const = 0;

  // Whether what goes wrong in runHook() or its future is the network's doing:
  // no code of a user's runs there.
  virtual bool fails_by_network_only() const { return true; }

  // Whether nobody writes to the bucket's buffer, or shows it to others, once
  // the hook's future is complete. Then its memory may become the gradients'.
  virtual bool lets_go_of_buffer() const { return false; }

  // Whether the bits of the result are those of the ranks' values, added in
  // the order of the ranks, however gradients are cut into buckets.
  virtual bool sums_in_order() const { return false; }

 protected:
  ~DeclaresWireFormat() = default;
};

// Wants to know where iterations begin, and whether their buckets will hold
// gradients.
class IterationListener {
 public:
  // Called before the first bucket is packed. `has_data`: false on a rank that
  // has run out of data and sends zeros; when such an iteration is over, called
  // with true. Must not communicate: a rank that fails before this sends its
  // zeros without having called it.
  virtual void iteration_begins(bool has_data) = 0;

 protected:
  ~IterationListener() = default;
};

// Updates parameters, so that these change while backward runs.
class StepsParameters {
 public:
  // Whether it updates any, or a hook that it calls does. Does not change.
  virtual bool steps_parameters() const = 0;

 protected:
  ~StepsParameters() = default;
};

// Lets ranks of one host meet in memory that they share
// (comm/ordered/host_sums.h), in place of their group's all-reduce.
class TakesHostSums {
 public:
  // Whether it takes them, or a hook that it calls does. Does not change.
  virtual bool takes_host_sums() const = 0;

  // Those of the hook's group. On all ranks, before a bucket travels.
  // REQUIRES: takes_host_sums().
  virtual void take_host_sums(std::shared_ptr<HostSums> sums) = 0;

 protected:
  ~TakesHostSums() = default;
};

// Whose errors reach the caller of backward as they were thrown. What other
// hooks throw is wrapped into an error that names bucket, iteration and rank.
class ThrowsOwnErrors {
 protected:
  virtual ~ThrowsOwnErrors() = default;
};

// Has a name for messages, by which ranks are compared.
class HasHookName {
 public:
  // Equal on all ranks.
  virtual std::string hook_name() const = 0;

 protected:
  ~HasHookName() = default;
};

// The answers of a hook. Does not own the hook, into which it points.
struct HookTraits {
  c10d::CommHookInterface* hook = nullptr;          // never null
  const DeclaresWireFormat* wire_format = nullptr;  // null: gets raw gradients
  IterationListener* listener = nullptr;            // null: not interested
  TakesHostSums* host_sums = nullptr;               // null: takes none
  bool fails_by_network_only = false;               // false for a user's hook
  bool lets_go_of_buffer = false;                   // likewise
  bool sums_in_order = false;                       // likewise
  bool throws_own_errors = false;
  bool steps_parameters = false;  // while backward runs
  std::string name = {};          // empty: it has none

  // Of the buffer that travels.
  at::ScalarType wire_dtype(at::ScalarType gradient_dtype) const;
};

// "comm hook fp16", for errors.
std::string describe(const HookTraits& hook);

HookTraits traits_of(c10d::CommHookInterface& hook);

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_HOOK_TRAITS_H_
