"""Data parallelism through sharded training's units: each rank holds all of each parameter.

    import brigade

    for block in model.blocks:
        brigade.replicate(block)
    brigade.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters())

As fully_shard(), with one shard and as many replicas as there are ranks: nothing is
gathered, and a unit's gradients are summed over all ranks when they are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import (
    ReplicateModule as _TorchReplicateModule,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from brigade._sharding_mesh import group_of
from brigade.fully_shard import FSDPModule, make_unit


class ReplicateModule(FSDPModule, _TorchReplicateModule):
    """Methods that a replicated module has beside those of its own class."""


def replicate(
    module: nn.Module | list[nn.Module],
    *,
    mesh: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    broadcasts_parameters: bool = True,
    comm_hook: Any = None,
) -> nn.Module | list[nn.Module]:
    """In place of torch.distributed._composable.replicate_with_fsdp's. Collective.

    Args:
        module: as fully_shard()'s: modules below it first.
        mesh: of one dimension, whose ranks have the parameters (default: all ranks). Modules
            are moved to its devices as by fully_shard().
        mp_policy: as fully_shard()'s.
        offload_policy: not so far.
        ignored_params: left as they are, on every rank its own.
        dp_mesh_dims: torch's DataParallelMeshDims: `replicate` names the dimensions of a larger
            mesh along which parameters are alike; no `shard`.
        broadcasts_parameters: all ranks begin with the parameters of the first.
        comm_hook: as fully_shard()'s.

    Returns:
        The same, whose class is now one that derives from its own and from ReplicateModule.

    Raises:
        ValueError: bad arguments, or ranks differ; on all ranks alike.
        NotImplementedError: names a feature that brigade lacks.
    """
    if dp_mesh_dims is not None and dp_mesh_dims.shard is not None:
        raise ValueError(
            f"replicate: expected dp_mesh_dims without shard, found {dp_mesh_dims}.\nUse "
            "fully_shard() for that."
        )
    if dp_mesh_dims is None and mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"replicate: expected a mesh of one dimension, found {mesh}.\nGive a slice of it, or "
            "dp_mesh_dims."
        )
    group, _ = group_of(mesh, dp_mesh_dims)
    return make_unit(
        module,
        group,
        num_shards=1,
        mesh=mesh,
        base=ReplicateModule,
        reshard_after_forward=False,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        broadcasts_parameters=broadcasts_parameters,
        comm_hook=comm_hook,
    )
