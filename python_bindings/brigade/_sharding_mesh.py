"""Process groups of the ranks that share a unit's parameters, from torch's mesh arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

# The ranks that have a unit's parameters, and how many of them are a row, that shares them.
_Shared = tuple[dist.ProcessGroup, int]


def group_of(mesh: Any, dp_mesh_dims: Any = None) -> _Shared:
    """The group of all ranks of a mesh, and how many of them are a row of it.

    Collective over them, the first time.

    Args:
        mesh: torch's; None: all ranks are one row.
        dp_mesh_dims: Of a larger mesh, the dimensions along which parameters are alike, as
            torch's DataParallelMeshDims: those that are shared along and those of replicas.

    Raises:
        ValueError: There is no group, or the mesh has no such dimensions.
        NotImplementedError: Ranks are in another order than theirs, and torch sorts them, or the
            lowest is not the first, which others begin with the parameters of.
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
    num_shards = 1
    for name in shard:
        num_shards *= mesh.mesh.size(found.index(name))
    return mine.reshape(-1, num_shards)


def _names(dims: str | Iterable[str] | None) -> tuple[str, ...]:
    if dims is None:
        return ()
    return (dims,) if isinstance(dims, str) else tuple(dims)


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
    """The mesh of a unit whose parameters are to be placed so.

    Args:
        named: The unit's parameters.
        placement_of: None, torch's Shard, or its ShardPlacementResult.
        mesh: Where that says none.

    Raises:
        NotImplementedError: Several meshes in one unit.
        ValueError: Something else.
    """
    chosen: list[tuple[str, Any]] = []
    for name, parameter in named:
        found = placement_of(parameter)
        placement, own = found, mesh
        if hasattr(found, "mesh_info"):
            placement, own = found.placement, _mesh_of_info(found.mesh_info)
        if placement is not None:
            _require_shard_of(name, parameter, placement)
        chosen.append((name, own))
        if own != chosen[0][1]:
            raise NotImplementedError(
                f"fully_shard: shard_placement_fn: '{chosen[0][0]}' is over {chosen[0][1]}, "
                f"'{name}' over {own}, and a unit has one mesh.\nShard the modules whose "
                "parameters have another one by themselves, with mesh=."
            )
    return chosen[0][1] if chosen else mesh


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
