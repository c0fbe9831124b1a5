"""Where a process group wants what no module has to travel."""

from __future__ import annotations

import torch
import torch.distributed as dist


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The CPU if the group has a backend for it, else its own device: NCCL's, for instance."""
    return torch.device(dist.distributed_c10d._get_object_coll_device(group))
