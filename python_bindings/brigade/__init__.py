"""Data-parallel training with brigade's reducer, in place of torch's.

    import brigade

    model = brigade.DistributedDataParallel(model)

or, for frameworks that wrap the model themselves, once at the start:

    brigade.install()
"""

import torch  # LibTorch must be loaded before the extension

from brigade import _built_with

# Another minor version has another binary interface.
if not torch.__version__.startswith(f"{_built_with.TORCH}."):
    raise ImportError(
        f"brigade was built with torch {_built_with.TORCH}, this is torch {torch.__version__}.\n"
        f"Install torch=={_built_with.TORCH}.*, or build brigade again with the torch that is here."
    )

from brigade._C import Logger, Reducer, then_collective, tie_outputs
from brigade._C import version as _version
from brigade._install import install, uninstall
from brigade._optimizer_state import broadcast_optimizer_state
from brigade._sharded_state import (
    full_optimizer_state_dict,
    load_full_optimizer_state_dict,
    load_sharded_optimizer_state_dict,
    sharded_optimizer_state_dict,
)
from brigade._sharded_tensors import ShardedParameter, TensorShard
from brigade._sharding_mesh import host_mesh
from brigade.distributed_data_parallel import DistributedDataParallel
from brigade.fully_shard import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from brigade.replicate import ReplicateModule, replicate
from brigade.safetensors_checkpoint import load_shards, load_whole, save_shards, save_whole
from brigade.sharded_checkpoint import LoadedCheckpoint, load_checkpoint, save_checkpoint

__version__ = _version()

__all__ = [
    "DistributedDataParallel",
    "FSDPModule",
    "LoadedCheckpoint",
    "Logger",
    "Reducer",
    "ReplicateModule",
    "ShardedParameter",
    "TensorShard",
    "__version__",
    "broadcast_optimizer_state",
    "full_optimizer_state_dict",
    "fully_shard",
    "host_mesh",
    "install",
    "load_checkpoint",
    "load_full_optimizer_state_dict",
    "load_sharded_optimizer_state_dict",
    "load_shards",
    "load_whole",
    "register_fsdp_forward_method",
    "replicate",
    "save_checkpoint",
    "save_shards",
    "save_whole",
    "sharded_optimizer_state_dict",
    "share_comm_ctx",
    "then_collective",
    "tie_outputs",
    "uninstall",
]
