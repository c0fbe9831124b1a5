// Everything that programs include. Headers that these don't include are
// brigade's own: they are not installed, and change without notice.

#ifndef BRIGADE_BRIGADE_H_
#define BRIGADE_BRIGADE_H_

// Process groups, and errors of peers.
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/process_group.h"

// Data parallelism: a module, or gradients of one's own.
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/reducer.h"

// Comm hooks.
#include "brigade/comm_hooks/comm_hooks.h"

// Sharding.
#include "brigade/fsdp/fully_shard.h"
#include "brigade/fsdp/reduction_hook.h"

// Checkpoints: of models, and of activations.
#include "brigade/checkpoint/checkpoint.h"
#include "brigade/hooks/activation_checkpoint.h"

// Which bucket size is fastest.
#include "brigade/bucket_sweep/sweep.h"

#endif  // BRIGADE_BRIGADE_H_
