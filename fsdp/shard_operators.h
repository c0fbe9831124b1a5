// Operators on sharded tensors: the boxed fallback of kShardedKey.
//
// In a forward or backward, the fallback unshards the parameters among the
// arguments and runs the operator on them. Otherwise it applies the operator's
// rule, which it derives once from the schema and tags:
//
//   local      Elementwise operators, copies and optimizers: on local tensors.
//              Sharded arguments must be cut identically; plain ones must be
//              0-dimensional. Results are sharded as the arguments.
//   draw       In-place random fills: fills an unsharded tensor and copies the
//              local part, so equal seeds give the bits of one process.
//   reduce     Norms, sums and extrema over all elements; collective. Norms and
//              GradScaler's check take one all-reduce for all tensors of a
//              call; the others gather the tensors. Results are plain.
//   handle     detach and alias: on the sharded tensor itself.
//   decompose  Composite operators: applies the rules of their parts.
//   refused    All others: NotImplementedError names operator and parameter.
//
// Autograd records only `handle` and `decompose`. For the other rules, grad
// mode with a sharded argument that requires a gradient is a RuntimeError.

#ifndef BRIGADE_FSDP_SHARD_OPERATORS_H_
#define BRIGADE_FSDP_SHARD_OPERATORS_H_

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace brigade {

// Registers the fallback at the first call, for the life of the process. Call
// it before any operator on a sharded tensor. Thread-safe.
const torch::Library& register_shard_operators();

// Returns the norm in float64, also of complex elements; 0 if there are none.
// REQUIRES: `order` > 0.
at::Tensor local_norm(const at::Tensor& local, double order);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARD_OPERATORS_H_
