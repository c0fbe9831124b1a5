// Keeps a module's buffers (running means and the like) equal over ranks and
// local replicas.
//
// Decides how and to whom; when is decided by ReplicatedModule.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_BUFFER_SYNC_H_
#define BRIGADE_DDP_BUFFER_SYNC_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/ddp/module_tensors.h"

namespace brigade {

// When buffers are made equal, in iterations that are reduced. Costs one
// collective per forward and dtype; a module without buffers pays nothing.
enum class BufferMode {
  kNone,           // each rank keeps its own
  kBeforeForward,  // forward begins with the buffers of one rank
  // What forward wrote is overwritten right after it. A buffer that backward
  // reads must not be among them: autograd refuses it.
  kAfterForward,
};

// Takes the place of the broadcast in forward() and sync_buffers(), though not
// at construction or when join() ends: makes the buffers of all ranks equal, or
// whatever else is wanted. `buffers`: those of local replica 0, without ignored
// ones. `source` is the authoritative rank: rank 0, or the lowest one with data
// while ranks join. Called at the same place on all ranks. What it throws comes
// out of these.
using BufferHook =
    std::function<void(std::span<const NamedTensor> buffers, int source)>;

// Called at each synchronisation, since a script module may replace its
// buffers.
using BufferLookup = std::function<std::vector<NamedTensor>()>;

class BufferSync {
 public:
  // `replicas`: one per local replica, alike. Null `hook`: broadcast.
  BufferSync(std::vector<BufferLookup> replicas, BufferHook hook,
             c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Nothing to make equal.
  bool are_none() const;

  // The hook does it.
  bool are_sent_by_hook() const { return hook_ != nullptr; }

  // Collective. Every local replica gets what replica 0 ends up with.
  // Errors: PeerError; what the hook throws.
  void run(int source) const;

  // Collective. As run(), without the hook.
  void broadcast(int source) const;

  // The same by `send`, which gives them the values of one rank.
  void broadcast_by(
      const std::function<void(std::vector<at::Tensor> buffers)>& send) const;

 private:
  void copy_to_other_replicas(std::span<const NamedTensor> buffers) const;

  const std::vector<BufferLookup> replicas_;
  const BufferHook hook_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace brigade

#endif  // BRIGADE_DDP_BUFFER_SYNC_H_
