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
