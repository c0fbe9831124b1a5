"""Translates fully_shard()'s mesh, dp_mesh_dims and shard_placement_fn into process groups.

A unit's ranks are its `group`; each `num_shards` consecutive ranks of it hold one replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from brigade._checks import AssertedValueError

_GroupAndShards = tuple[dist.ProcessGroup, int]


def group_and_num_shards(mesh: Any, dp_mesh_dims: Any = None) -> _GroupAndShards:
    """Returns (group, num_shards). Collective over the mesh's ranks when it makes a group."""
    if mesh is not None and not isinstance(mesh, dist.DeviceMesh):
        raise TypeError(
            f"fully_shard: mesh must be a torch.distributed.DeviceMesh, got {mesh!r:.100}.\n"
            "Pass the result of init_device_mesh()."
        )
    if dp_mesh_dims is not None:
        return _from_ranks(_data_parallel_ranks(mesh, dp_mesh_dims), mesh)
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
        raise ValueError(
            f"fully_shard: expected a mesh of one or two dimensions, found {mesh}.\nName its "
            "data-parallel dimensions in dp_mesh_dims."
        )
    return _from_ranks(mesh.mesh, mesh)


def _data_parallel_ranks(mesh: Any, dims: Any) -> torch.Tensor:
    """Returns the ranks that share this rank's parameters, of shape [replicas, shards]."""
    shard, replicate = _names(dims.shard), _names(dims.replicate)
    found = () if mesh is None else (mesh.mesh_dim_names or ())
    chosen = [*replicate, *shard]
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(found):
        raise ValueError(
            f"fully_shard: expected dp_mesh_dims to name dimensions of the mesh, each once, found "
            f"shard {shard} and replicate {replicate}, and a mesh with {tuple(found)}.\nPass the "
            "mesh of all dimensions, with mesh_dim_names."
        )
    others = [name for name in found if name not in chosen]
    order = [found.index(name) for name in (*others, *chosen)]
    coordinate = [mesh.get_coordinate()[found.index(name)] for name in others]
    ranks = mesh.mesh.permute(order)[tuple(coordinate)]
    return ranks.reshape(-1, math.prod(mesh.mesh.size(found.index(name)) for name in shard))


def _names(dims: str | Iterable[str] | None) -> tuple[str, ...]:
    return (dims,) if isinstance(dims, str) else tuple(dims or ())


def _from_ranks(ranks: torch.Tensor, mesh: Any) -> _GroupAndShards:
    flat = ranks.flatten().tolist()
    if flat[0] != min(flat):
        raise NotImplementedError(
            f"fully_shard: expected a mesh that begins with its lowest rank, found {flat} of "
            f"{mesh}.\nPut the lowest rank first."
        )
    if flat == list(range(dist.get_world_size())):
        return dist.group.WORLD, ranks.size(1)
    return _group_of_ranks(tuple(flat)), ranks.size(1)


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _group_of_ranks(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Returns the same group for all meshes of these ranks."""
    group = _groups.get(ranks)
    if group is None or group not in dist.distributed_c10d._world.pg_map:  # destroyed since
        group = _groups[ranks] = dist.new_group(
            list(ranks), use_local_synchronization=True, sort_ranks=False
        )
    return group


def mesh_of_placements(
    named: list[tuple[str, nn.Parameter]], placement_fn: Callable[[nn.Parameter], Any], mesh: Any
) -> Any:
    """Returns the one mesh of a unit with these parameters; `mesh` if `placement_fn` names none.

    Sets `_brigade_placement` of the parameters.
    """
    first: tuple[str, Any] | None = None
    for name, parameter in named:
        placement, own = placement_fn(parameter), mesh
        if hasattr(placement, "mesh_info"):
            placement, own = placement.placement, _mesh_of_info(placement.mesh_info)
        if placement is not None:
            _require_shard_of(name, parameter, placement)
            parameter._brigade_placement = Shard(placement.dim % max(parameter.dim(), 1))
        first = first or (name, own)
        if own != first[1]:
            raise NotImplementedError(
                f"fully_shard: shard_placement_fn: expected one mesh for all parameters of the "
                f"unit, found {first[1]} for '{first[0]}' and {own} for '{name}'.\nCall "
                "fully_shard(submodule, mesh=...) for the modules on another mesh first."
            )
    return first[1] if first else mesh


def _require_shard_of(name: str, parameter: nn.Parameter, placement: Any) -> None:
    if not isinstance(placement, Shard):
        raise ValueError(
            f"fully_shard: shard_placement_fn: expected None, a Shard or a ShardPlacementResult, "
            f"found {placement!r} for '{name}'.\nReturn None for the default."
        )
    num_dims = max(parameter.dim(), 1)
    if not -num_dims <= placement.dim < num_dims:
        raise AssertedValueError(
            f"fully_shard: shard_placement_fn: expected one of the {parameter.dim()} dimensions of "
            f"'{name}', found Shard({placement.dim}).\nReturn Shard(0) or None."
        )


def _mesh_of_info(info: Any) -> Any:
    mesh, shard, replicate = info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim
    if (mesh.ndim, shard, replicate) not in ((1, 0, None), (2, 1, 0)):
        raise NotImplementedError(
            "fully_shard: shard_placement_fn: expected a 1-D or a 2-D mesh (replicas, shards), "
            f"found {mesh} with shard_mesh_dim {shard} and replicate_mesh_dim {replicate}."
        )
    return mesh
