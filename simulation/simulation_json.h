// Simulation of a training step by JSON, for the command line and Python.
//
//   simulate_json(R"({"model": "llama-70b", "cluster": {"hosts": 32},
//                     "strategy": {"kind": "fsdp2"}})");

#ifndef BRIGADE_SIMULATION_SIMULATION_JSON_H_
#define BRIGADE_SIMULATION_SIMULATION_JSON_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace brigade {

// Keys of `request`; all but "model" and "strategy": {"kind"} are optional.
// Sizes are bytes, times are seconds, "sequence_length" 0 is the model's own.
//
//   "model": name of a built-in model (model_shape.h), or {"name", "layers":
//       [{"name", "tensors": [elements], "forward_flops", "activation_bytes",
//         "checkpoint_bytes", "forward_s", "backward_s"}]}
//   "sequence_length": 0, "batch": 1   samples per rank and micro-batch
//   "cluster": {
//       "device": "a100", or {"name": "a100", "flops_per_s", "memory_bytes",
//           "memory_bytes_per_s", "utilization"}; without a name, numbers that
//           are left out are unknown: no limit, no time
//       "hosts": 1, "gpus_per_host": 8, "nics_per_host": 0   one per GPU
//       "inside": "nvlink3", "between": "hdr"   named_link(), or
//           {"latency_s": 0, "bytes_per_s"}
//       "hosts_per_rack": 0   all, "oversubscription": 1
//       "jitter": 0, "straggler_slowdown": 1
//       "costs": {"all_reduce", "all_gather", "reduce_scatter": [[bytes, s]],
//                 "concurrency": 1}   instead of links; the concurrency is that
//                 of buckets}
//   "strategy": {
//       "kind": "ddp", "zero1", "zero2", "zero3", "fsdp2", "yafsdp", "brigade"
//       "shard_ranks": 0   all
//       "bucket_caps_bytes": [1 MiB, 25 MiB], or "plan": "exact"
//       "next_forward_gather": false
//       "reshard_after_forward": true, false, "fit" (keeps as many units
//           unsharded as fit), or indices of the units to keep unsharded
//       "prefetch_depth": 1, "buffers": 2
//       "micro_batches": 1, "sync_every_micro_batch": false
//       "checkpoint": "none", "all", "fit", or indices of layers
//       "parameter_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12}
//
// Returns TrainingStep (training_step.h) as
//   {"step_s", "forward_s", "backward_s", "optimizer_s", "recompute_s",
//    "exposed_s", "communication_s", "tflops", "mfu", "sent_bytes_per_rank",
//    "between_hosts_bytes_per_rank", "between_racks_bytes_per_rank",
//    "memory": {"parameters", "gradients", "optimizer", "unsharded",
//               "activations", "total", "capacity", "fits"},
//    "checkpointed_layers", "kept_units",
//    "events": [{"stream", "name", "begin_s", "end_s"}],
//    "memory_over_step": [{"time_s", "bytes"}]}
// Streams: "compute", "communication", and "replication" for all-reduces
// between replicas.
//
// Errors: InvalidArgument if the text is not JSON, a key is unknown, missing,
// of another type or out of range, keys contradict each other; those of
// simulate_step(). The message names the key.
//
// Thread safety: pure.
absl::StatusOr<std::string> simulate_json(std::string_view request);

}  // namespace brigade

#endif  // BRIGADE_SIMULATION_SIMULATION_JSON_H_
