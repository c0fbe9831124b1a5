// Tells when a backward pass goes through the outputs of a forward pass.
//
// Thread safety: the callback is called on whichever thread computes the
// gradient of an output, once per output and backward.

#ifndef BRIGADE_HOOKS_OUTPUT_WATCH_H_
#define BRIGADE_HOOKS_OUTPUT_WATCH_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "brigade/hooks/autograd_node.h"

namespace brigade {

// Calls `on_reached` when the gradient of one of `outputs` has been computed,
// unless `owner` has expired by then. Outputs without a history are skipped: a
// leaf would keep the hook beyond the graph. Returns whether any has one.
//
// `made_from`: a sequence number of autograd's nodes (ATen/SequenceNumber.h).
// Of an output that is a view, what it is a view of is watched, too, if that
// has been made since: who changes the view in place makes it another one,
// whose backward passes by the old.
bool watch_outputs(std::span<const at::Tensor> outputs,
                   std::weak_ptr<void> owner, std::function<void()> on_reached,
                   std::optional<uint64_t> made_from = std::nullopt);

// The nodes that this watches.
std::vector<WeakNodePtr> watched_nodes(
    std::span<const at::Tensor> outputs,
    std::optional<uint64_t> made_from = std::nullopt);

}  // namespace brigade

#endif  // BRIGADE_HOOKS_OUTPUT_WATCH_H_
