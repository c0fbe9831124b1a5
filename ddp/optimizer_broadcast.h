// Gives every rank the state of one rank's optimizer.
//
// After join() ranks hold one model, but have made unequally many steps:
// momenta and step counts differ, and training on would let the ranks drift
// apart without a word.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_OPTIMIZER_BROADCAST_H_
#define BRIGADE_DDP_OPTIMIZER_BROADCAST_H_

#include <torch/optim/optimizer.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

// Collective. Afterwards `optimizer` has the state and the options of rank
// `source`'s, bit for bit, and no state of parameters that `source` has never
// stepped. After join(), `source` is to be a rank that had data to the end,
// which rank 0 need not be. All are of one type and hold the same parameters in
// the same order. Costs two broadcasts: of 8 bytes, and of the serialised
// state. A world of 1 communicates nothing.
//
// Errors: PeerError if the network fails; what LibTorch throws if the state
// does not fit this optimizer, whose own state and options stay then.
void broadcast_optimizer_state(
    torch::optim::Optimizer& optimizer,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int source = 0);

}  // namespace brigade

#endif  // BRIGADE_DDP_OPTIMIZER_BROADCAST_H_
