// Public interface of brigade. Headers that this file does not include are
// internal: they are not installed, and change without notice.

#ifndef BRIGADE_BRIGADE_H_
#define BRIGADE_BRIGADE_H_

// Process groups and their errors.
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/process_group.h"

// Data parallelism: wrapped modules, or gradients by hand.
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/reducer.h"

// Communication hooks.
#include "brigade/comm_hooks/comm_hooks.h"

// FSDP.
#include "brigade/fsdp/fully_shard.h"

// Checkpoints of models, and activation checkpointing.
#include "brigade/checkpoint/checkpoint.h"
#include "brigade/hooks/activation_checkpoint.h"

// Search for the fastest bucket size; prediction of a step on a cluster.
#include "brigade/bucket_sweep/sweep.h"
#include "brigade/simulation/simulation_json.h"

#endif  // BRIGADE_BRIGADE_H_
