"""Tensor-parallel (DTensor) parameters in fully_shard(): shards of this rank's local tensors.

parallelize_module() comes first, then fully_shard() along the other mesh dimensions. Modules see
DTensors in forward, backward and whole_parameters().
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import register_optimizer_step_pre_hook

from brigade import _C
from brigade._sharded_tensors import ShardedParameter, TensorShard, as_shard, write_shard
from brigade._tensor_trees import map_tensors, tensors_in


def local_parameter(
    parameter: nn.Parameter, where: str, group: dist.ProcessGroup, device_type: str | None
) -> nn.Parameter:
    """Returns the parameter of a DTensor's local tensor, which a unit over `group` can shard."""
    spec = parameter._spec
    if any(type(placement) not in (Shard, Replicate) for placement in spec.placements):
        raise NotImplementedError(
            f"fully_shard: parameter {where} is a DTensor with placements {spec.placements}; only "
            "Shard and Replicate are supported.\nRedistribute it before fully_shard."
        )
    ranks = dist.get_process_group_ranks(group)
    is_apart = set(ranks).intersection(spec.mesh.mesh.flatten().tolist()) == {dist.get_rank()}
    if not is_apart or device_type not in (None, spec.mesh.device_type):
        raise ValueError(
            f"fully_shard: parameter {where} is a DTensor over {spec.mesh}; expected a mesh of the "
            f"same device type that shares only this rank with it, found ranks {ranks}.\nPass the "
            "data-parallel dimensions of the mesh, for example mesh=mesh['dp']."
        )
    _watch_optimizers()
    if not hasattr(parameter, "_brigade_local"):  # tied parameters share it
        local = nn.Parameter(parameter._local_tensor.detach(), parameter.requires_grad)
        vars(local).update(vars(parameter), _brigade_spec=spec)
        parameter._brigade_local = local
    return parameter._brigade_local


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_require_shards)


def _require_shards(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        locals_of = (getattr(parameter, "_brigade_local", None) for parameter in group["params"])
        if any(isinstance(local, TensorShard) for local in locals_of):
            raise RuntimeError(
                "fully_shard: the optimizer holds a DTensor that fully_shard() has replaced, and "
                "would not train it.\nMake the optimizer after fully_shard()."
            )


def _awaited(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


class _Local(torch.autograd.Function):
    """The unsharded local tensor of a shard, or the awaited result of a collective."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.ops.aten.alias(_awaited(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _awaited(gradient)


class TensorParallelShard(TensorShard):
    """A shard of a tensor-parallel parameter, its gradient or optimizer state.

    `shape`, size(), numel() and full_tensor() are those of the DTensor. Results of operators that
    are not sharded, such as norms, are those of the DTensor, too: collective over both meshes.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        shards = [t for t in tensors_in((args, kwargs)) if isinstance(t, TensorParallelShard)]
        if name == "__setitem__":
            raise NotImplementedError(
                "fully_shard: indices of a tensor-parallel parameter can't be written.\nWrite "
                "inside of whole_parameters(writes=True), through the module's attribute."
            )
        if name in ("rand_like", "randn_like", "randint_like"):
            return shards[0]._shard_of(func(shards[0]._empty(), *args[1:], **kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if name == "_foreach_norm":
            return _norms_over_groups(args[0], result, *args[1:], **kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            for group in _groups_of(shards):
                dist.all_reduce(args[1], dist.ReduceOp.MAX, group=group)
        first = result[0] if isinstance(result, (list, tuple)) and result else result
        if not isinstance(first, torch.Tensor):
            if name not in ("equal", "allclose"):
                return result
        elif _C.is_sharded(first):
            is_plain = type(result) is torch.Tensor
            return as_shard(result, shards[0]) if is_plain else result
        elif name == "grad" or name.startswith("new"):
            return result
        args, kwargs = map_tensors((args, kwargs), _unsharded)
        return func(*args, **kwargs)

    @property
    def shape(self) -> torch.Size:
        return self._brigade_origin.spec.shape

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        stride = self._brigade_origin.spec.stride
        return stride if dim is None else stride[dim]

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def device_mesh(self) -> Any:
        mesh, dp_names = self._brigade_origin.spec.mesh, super().device_mesh.mesh_dim_names
        return mesh._get_root_mesh()[(*dp_names, *mesh.mesh_dim_names)]

    @property
    def placements(self) -> tuple:
        return (*super().placements, *self._brigade_origin.spec.placements)

    def is_unsharded(self) -> bool:
        """Returns True in whole_parameters() and after unshard()."""
        unit = self._unit()
        root = unit.root
        return root is not None and (root.is_unsharded or unit in root.manually_unsharded)

    def dtensor(self, local: torch.Tensor | None = None) -> DTensor:
        """Returns the DTensor of the unsharded local tensor, which autograd records."""
        spec = self._brigade_origin.spec
        local = _Local.apply(self) if local is None else local
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )

    def _gathered(self) -> torch.Tensor:
        return self.dtensor(_C.full_tensor(self)).full_tensor()

    def _draw(self, name: str, *args: Any, **options: Any) -> TensorParallelShard:
        write_shard(self, getattr(self._empty(), name)(*args, **options))
        return self

    def _place(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns (sizes, offsets) of the local tensor in the DTensor."""
        spec = self._brigade_origin.spec
        return compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)

    def _part_of(self, full: torch.Tensor) -> torch.Tensor:
        for dim, (size, offset) in enumerate(zip(*self._place(), strict=True)):
            full = full.narrow(dim, min(offset, full.size(dim)), size)
        return full

    def _boxes(self) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        begin = self._place()[1]
        for offsets, memory in super()._boxes():
            if memory.numel() > 0 or self.numel() == 0:
                yield tuple(map(operator.add, begin, offsets)), memory

    def groups(self) -> list[dist.ProcessGroup]:
        """Returns the groups whose ranks hold different elements of the DTensor."""
        spec = self._brigade_origin.spec
        placed = enumerate(spec.placements)
        return [spec.mesh.get_group(dim) for dim, placement in placed if placement.is_shard()]


TensorParallelShard._shard_class = TensorParallelShard
TensorParallelShard.nelement = TensorParallelShard.numel
for _name in ("normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_"):
    setattr(TensorParallelShard, _name, functools.partialmethod(TensorParallelShard._draw, _name))


class TensorParallelParameter(TensorParallelShard, ShardedParameter):
    """A sharded tensor-parallel parameter."""


def _groups_of(tensors: list[torch.Tensor]) -> list[dist.ProcessGroup]:
    shards = [tensor for tensor in tensors if isinstance(tensor, TensorParallelShard)]
    return list(dict.fromkeys(group for shard in shards for group in shard.groups()))


def _norms_over_groups(
    tensors: list[torch.Tensor], norms: list[torch.Tensor], ord: float = 2, **_: Any
) -> list[torch.Tensor]:
    """Returns the norms of DTensors; `norms` are those of local tensors."""
    norms = list(norms)
    for group in _groups_of(tensors):
        members = [i for i, tensor in enumerate(tensors) if group in _groups_of([tensor])]
        own = torch.stack([norms[i] for i in members])
        of_ranks = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(of_ranks, own, group=group)
        together = torch.linalg.vector_norm(torch.stack(of_ranks), ord, dim=0)
        for i, norm in zip(members, together.unbind(), strict=True):
            norms[i] = norm
    return norms


def _unsharded(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, TensorParallelShard):
        return tensor
    root = tensor._unit().root
    is_in_forward = root is not None and root.native.is_in_forward
    return tensor.dtensor() if is_in_forward or tensor.is_unsharded() else tensor.full_tensor()


def _local_result(tensor: torch.Tensor) -> torch.Tensor:
    return _Local.apply(tensor) if isinstance(tensor, AsyncCollectiveTensor) else tensor


@functools.cache
def reading_dtensors(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass whose parameters are DTensors in forward, backward or while unsharded."""

    def getattr_(self: nn.Module, name: str) -> Any:
        value = super(made, self).__getattr__(name)
        if not isinstance(value, TensorParallelParameter):
            return value
        return value.dtensor() if value.is_unsharded() or value._unit().is_in_pass() else value

    @torch.compiler.disable
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = map_tensors(super(made, self).__call__(*args, **kwargs), _local_result)
        # Operators on a DTensor do not unshard its local tensor in backward.
        for parameter in self._parameters.values():
            if isinstance(parameter, TensorParallelParameter):
                parameter._unit().unshard_before_backward(output)
        return output

    space = {"__getattr__": getattr_, "__call__": call, "__module__": cls.__module__}
    made = type(cls.__name__, (cls,), space)
    return made
