"""Data-parallel training with brigade's reducer, in place of torch's.

    import brigade

    model = brigade.DistributedDataParallel(model)

or, for frameworks that wrap the model themselves, once at the start:

    brigade.install()
"""

import torch  # noqa: F401  (LibTorch must be loaded before the extension)

from brigade._C import Logger, Reducer, then_collective, tie_outputs
from brigade._C import version as _version
from brigade._install import install, uninstall
from brigade._optimizer_state import broadcast_optimizer_state
from brigade.distributed_data_parallel import DistributedDataParallel

__version__ = _version()

__all__ = [
    "DistributedDataParallel",
    "Logger",
    "Reducer",
    "__version__",
    "broadcast_optimizer_state",
    "install",
    "then_collective",
    "tie_outputs",
    "uninstall",
]
