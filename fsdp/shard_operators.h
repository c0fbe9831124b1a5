// Operators on sharded tensors: a boxed fallback on kShardedKey, which sees
// every operator with a sharded argument.
//
// In a forward or backward of the arguments' root it unshards them and calls
// on. Otherwise the operator's rule decides, found from its schema and tags at
// first use:
//
//   local      elementwise operators, copies, optimizers: on the local pieces.
//              All sharded arguments hold one piece; plain ones are
//              0-dimensional. Results are sharded as their arguments.
//   draw       in-place random fills: the whole is drawn and the piece kept, so
//              that equal seeds give the bits of one process.
//   reduce     norms, sums and extremes over all elements. Collective: norms
//              and GradScaler's check take one all-reduce for all tensors of a
//              call, the others gather the wholes. Results are plain.
//   handle     detach and alias: on the tensor itself.
//   decompose  composite operators: by the operators that they consist of.
//   refused    NotImplementedError that names the operator and the parameter.
//
// None but `handle` and `decompose` is recorded by autograd: a RuntimeError if
// grad mode is on and a sharded argument requires a gradient.

#ifndef BRIGADE_FSDP_SHARD_OPERATORS_H_
#define BRIGADE_FSDP_SHARD_OPERATORS_H_

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace brigade {

// Registers the fallback, once and until the process ends; before any operator
// on a sharded tensor. Returns what holds it. Any thread.
const torch::Library& register_shard_operators();

// In float64, also of complex elements; 0 of none. `order` > 0.
at::Tensor piece_norm(const at::Tensor& piece, double order);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARD_OPERATORS_H_
