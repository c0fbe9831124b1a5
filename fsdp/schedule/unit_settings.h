// What may be changed of a unit while it is trained.

#ifndef BRIGADE_FSDP_SCHEDULE_UNIT_SETTINGS_H_
#define BRIGADE_FSDP_SCHEDULE_UNIT_SETTINGS_H_

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace brigade {

// May be changed between a forward or backward and the next, alike on all ranks
// but for the prefetch.
struct UnitSettings {
  // Released behind its forward, and gathered again for its backward. False: it
  // stays whole from forward to backward.
  bool reshards_after_forward = true;

  // Behind its forward it stays in slices on so many ranks next to each other,
  // and is gathered among these for its backward. Divides the number of shards;
  // named by some unit of its mesh when the root is made. Unset: only its
  // shards stay.
  std::optional<int> reshards_to = std::nullopt;

  // False: it stays whole behind its backward, until its shards are changed.
  bool reshards_after_backward = true;

  // It is called here and there in a pass, as the norms of all blocks are:
  // whole from its first call to the end of the pass, so gathered once, and
  // reduced when the last of its gradients has come. Not to be changed.
  bool spans_passes = false;

  // False: its backward reads none of its parameters.
  bool gathers_in_backward = true;

  // The sum of its gradients is divided by that. Unset: by the number of
  // ranks of its mesh.
  std::optional<double> gradient_divisor = std::nullopt;

  // Floating tensors that its forward gets are cast to the options' param_dtype,
  // if there is one.
  bool cast_forward_inputs = true;

  // What its front casts the floating tensors of its outputs to. Unset: they stay as
  // they are.
  std::optional<at::ScalarType> output_dtype = std::nullopt;

  // False: backwards add its gradients up on this rank, whole, until one that
  // reduces them.
  bool synchronizes = true;

  // False: of a mesh with replicas, sums over a row are kept as a part of the
  // next ones, as ShardedRoot::set_sums_over_replicas() says for all units.
  bool sums_over_replicas = true;

  // True: the memory that it is whole in stays its own while it is sharded, so
  // that its whole parameters have one address. Planned if it is set before the
  // first forward.
  bool keeps_storage = false;

  // Units whose gathers are launched once this one is needed, in forward and in
  // backward, with those that are expected before them. Empty: as many as the
  // options say.
  std::vector<size_t> forward_prefetch = {};
  std::vector<size_t> backward_prefetch = {};

  bool keeps_slices() const {
    return reshards_after_forward && reshards_to && gathers_in_backward;
  }
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_UNIT_SETTINGS_H_
