"""Where a process group wants what no module has to travel."""

from __future__ import annotations

import torch
import torch.distributed as dist


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The CPU if the group has a backend for it, else its own device: NCCL's, for instance."""
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    bound = group.bound_device_id
    return bound if bound is not None and bound.type == device.type else device


def serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on the device can travel in the group, as far as it tells."""
    return not group._device_types or device.type in {d.type for d in group._device_types}
