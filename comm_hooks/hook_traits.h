// What a comm hook can do beside moving buckets, asked of it once: when it is
// set, not for every bucket.
//
// Thread safety: const methods are as those of the hook.

#ifndef BRIGADE_COMM_HOOKS_HOOK_TRAITS_H_
#define BRIGADE_COMM_HOOKS_HOOK_TRAITS_H_

#include <c10/core/ScalarType.h>

#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "brigade/comm_hooks/iteration_listener.h"
#include "brigade/comm_hooks/takes_host_sums.h"
#include "brigade/comm_hooks/wire_format.h"

namespace brigade {

// Does not own the hook, into which it points.
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
