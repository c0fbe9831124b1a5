"""Process groups of the ranks that share a unit's parameters, from torch's mesh arguments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

# The ranks that have a unit's parameters, and how many of them are a row, that shares them.
_Shared = tuple[dist.ProcessGroup, int]


def group_of(mesh: Any, dp_mesh_dims: Any = None) -> _Shared:
    """The group of all ranks of a mesh, and how many of them share parameters.

    Collective over them, the first time. `dp_mesh_dims`: torch's DataParallelMeshDims.
    """
    if dp_mesh_dims is not None:
        return _group_of_matrix(_part_of(mesh, dp_mesh_dims), mesh)
    if mesh is None:
        if not dist.is_initialized():
            raise ValueError(
                "fully_shard: there is no process group.\nCall "
                "torch.distributed.init_process_group() first."
            )
        return dist.group.WORLD, dist.get_world_size()
    if mesh.ndim == 1:
        return mesh.get_group(), mesh.size()
    if mesh.ndim != 2:
        raise NotImplementedError(
            f"fully_shard: expected a mesh of one dimension, or of two, found {mesh}.\nSay which "
            "dimensions are of data by dp_mesh_dims."
        )
    return _group_of_matrix(mesh.mesh, mesh)


def _part_of(mesh: Any, dims: Any) -> torch.Tensor:
    """[replicas, shards] of ranks, of which this one is one."""
    shard, replicate = _names(dims.shard), _names(dims.replicate)
    found = () if mesh is None else (mesh.mesh_dim_names or ())
    chosen = [*replicate, *shard]
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(found):
        raise ValueError(
            f"fully_shard: expected dp_mesh_dims to name dimensions of the mesh, each once, found "
            f"shard {shard} and replicate {replicate}, and a mesh with {tuple(found)}.\nGive the "
            "mesh of all dimensions, with mesh_dim_names."
        )
    others = [name for name in found if name not in chosen]
    order = [found.index(name) for name in (*others, *chosen)]
    place = [mesh.get_coordinate()[found.index(name)] for name in others]
    mine = mesh.mesh.permute(order)[tuple(place)]
    return mine.reshape(-1, math.prod(mesh.mesh.size(found.index(name)) for name in shard))


def _names(dims: str | Iterable[str] | None) -> tuple[str, ...]:
    return (dims,) if isinstance(dims, str) else tuple(dims or ())


def _group_of_matrix(ranks: torch.Tensor, mesh: Any) -> _Shared:
    flat = ranks.flatten().tolist()
    if flat != sorted(flat) and not (_KEEPS_ORDER and flat[0] == min(flat)):
        raise NotImplementedError(
            f"fully_shard: expected ranks in rising order along replicas and shards, found {flat} "
            f"of {mesh}.\nLet replicas be an outer dimension of the mesh, and shards an inner one, "
            "or use a torch whose new_group() has sort_ranks, and let the lowest rank be the first."
        )
    if flat == list(range(dist.get_world_size())):
        return dist.group.WORLD, ranks.size(1)
    return _group_of_ranks(tuple(flat)), ranks.size(1)


# Newer torch makes groups whose ranks are in the order that they are given in.
_KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _group_of_ranks(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """One for all meshes of these ranks. Collective over them, the first time."""
    group = _groups.get(ranks)
    if group is None or group not in dist.distributed_c10d._world.pg_map:  # destroyed since
        order = {"sort_ranks": False} if _KEEPS_ORDER else {}
        group = _groups[ranks] = dist.new_group(
            list(ranks), use_local_synchronization=True, **order
        )
    return group


def mesh_of_placements(
    named: list[tuple[str, nn.Parameter]], placement_of: Callable[[nn.Parameter], Any], mesh: Any
) -> Any:
    """The one mesh of a unit with these parameters; `mesh` where `placement_of` says none."""
    first: tuple[str, Any] | None = None
    for name, parameter in named:
        placement, own = placement_of(parameter), mesh
        if hasattr(placement, "mesh_info"):
            placement, own = placement.placement, _mesh_of_info(placement.mesh_info)
        if placement is not None:
            _require_shard_of(name, parameter, placement)
        first = first or (name, own)
        if own != first[1]:
            raise NotImplementedError(
                f"fully_shard: shard_placement_fn: '{first[0]}' is over {first[1]}, '{name}' over "
                f"{own}, and a unit has one mesh.\nShard the modules whose parameters have another "
                "one by themselves, with mesh=."
            )
    return first[1] if first else mesh


def _require_shard_of(name: str, parameter: nn.Parameter, placement: Any) -> None:
    if not isinstance(placement, Shard):
        raise ValueError(
            f"fully_shard: shard_placement_fn: expected None, a Shard or a ShardPlacementResult, "
            f"found {placement!r} of '{name}'.\nReturn None for the default."
        )
    num_dims = max(parameter.dim(), 1)
    if not -num_dims <= placement.dim < num_dims:
        raise ValueError(
            f"fully_shard: shard_placement_fn: expected a dimension of '{name}', which has "
            f"{parameter.dim()}, found Shard({placement.dim}).\nReturn Shard(0) or None."
        )


def _mesh_of_info(info: Any) -> Any:
    mesh, shard, replicate = info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim
    if (mesh.ndim, shard, replicate) not in ((1, 0, None), (2, 1, 0)):
        raise NotImplementedError(
            "fully_shard: shard_placement_fn: expected a mesh of one dimension, or of (replicas, "
            f"shards), found {mesh}, shards along {shard} and replicas along {replicate}."
        )
    return mesh
