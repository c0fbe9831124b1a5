"""Drop-in replacements for torch's DistributedDataParallel and fully_shard.

    model = brigade.DistributedDataParallel(model)

or ``brigade.fully_shard(model)``; or, for frameworks that wrap the model themselves, once at the
start:

    brigade.install()
"""

import torch  # LibTorch must be loaded before the extension

from brigade import _built_with

# The binary interface changes with torch's minor version.
if not torch.__version__.startswith(f"{_built_with.TORCH}."):
    raise ImportError(
        f"brigade was built with torch {_built_with.TORCH}, found torch {torch.__version__}.\n"
        f"Install torch=={_built_with.TORCH}.*, or rebuild brigade with the installed torch."
    )

from brigade._C import Reducer, then_collective
from brigade._C import version as _version
from brigade._install import install, uninstall
from brigade._sharded_tensors import ShardedParameter, TensorShard
from brigade.distributed_data_parallel import DistributedDataParallel
from brigade.fully_shard import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from brigade.safetensors_checkpoint import load_shards, load_whole, save_shards, save_whole

__version__ = _version()

__all__ = [
    "DistributedDataParallel",
    "FSDPModule",
    "Reducer",
    "ShardedParameter",
    "TensorShard",
    "__version__",
    "fully_shard",
    "install",
    "load_shards",
    "load_whole",
    "register_fsdp_forward_method",
    "save_shards",
    "save_whole",
    "share_comm_ctx",
    "then_collective",
    "uninstall",
]
