"""Data-parallel training with brigade's reducer, in place of torch's.

    import brigade

    model = brigade.DistributedDataParallel(model)

or, for frameworks that wrap the model themselves, once at the start:

    brigade.install()
"""

import torch  # noqa: F401  (LibTorch must be loaded before the extension)

from brigade._C import Logger, Reducer
from brigade._install import install, uninstall
from brigade.distributed_data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel", "Logger", "Reducer", "install", "uninstall"]
