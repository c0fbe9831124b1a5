"""Tensor-parallel (DTensor) parameters in fully_shard(): shards of this rank's local tensors.

parallelize_module() comes first, then fully_shard() along the other mesh dimensions. Modules see
DTensors in forward, backward and whole_parameters().
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

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
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ValueError(
            f"fully_shard: parameter {where} is a DTensor with hooks, which would not run.\n"
            "Register them after fully_shard()."
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


_DRAWS = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_"
_OF_SHAPE = "__len__ nelement numel size stride"

# Names of functions by rule. "method": the class defines it; "like": the values of one process;
# "plain", "passive": the local function, with a plain or any result; "unsharded": on full tensors;
# "local": on shards of one layout, also all pointwise operators; "refused": all others.
_RULES = {
    "method": f"{_OF_SHAPE} {_DRAWS}",
    "like": "rand_like randn_like randint_like",
    "plain": "_foreach_norm grad new new_empty new_full new_ones new_tensor new_zeros",
    "passive": "alias backward detach detach_ dim element_size get_device is_complex is_contiguous "
    "is_floating_point is_inference is_signed ndimension register_hook requires_grad_ retain_grad "
    "register_post_accumulate_grad_hook type __format__",
    "unsharded": "all allclose amax amin any argmax argmin count_nonzero dot equal histc isclose "
    "item linalg_norm linalg_vector_norm max mean median min norm prod std sum var __bool__ "
    "__float__ __int__",
    "local": "absolute bfloat16 bool clone contiguous copy_ cpu cuda divide double empty_like "
    "fill_ float full_like half int long multiply ones_like subtract to type_as zero_ zeros_like "
    "_foreach_copy_ _foreach_zero_ _amp_foreach_non_finite_check_and_unscale_",
}


@functools.cache
def _rule_of(name: str) -> str:
    for rule, names in _RULES.items():
        if name in names.split():
            return rule
    base = name.removeprefix("_foreach_")
    base = base.strip("_")[name.startswith("__r") :] if base.startswith("__") else base.rstrip("_")
    packet = getattr(torch.ops.aten, base, getattr(torch.ops.aten, f"bitwise_{base}", None))
    tags = [tag for o in packet.overloads() for tag in getattr(packet, o).tags] if packet else []
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return "local" if is_pointwise or name.startswith("_fused_") else "refused"


def _name_and_rule_of(func: Callable) -> tuple[str, str]:
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(func.__self__, "__name__", name)
        return name, "refused" if name in ("T", "mT", "H", "mH", "real", "imag") else "passive"
    is_init = getattr(func, "__module__", "") == "torch.nn.init"
    return name, "passive" if is_init else _rule_of(name)


def _refuse(name: str, shard: TensorParallelShard) -> NoReturn:
    path = shard._unit().name_of(shard)
    what = f"parameter '{path}'" if path else "tensor"
    raise NotImplementedError(
        f"{name}: can't use a shard of the tensor-parallel {what} of shape {tuple(shard.shape)} "
        "here.\nUse its full_tensor(), or the module's attribute inside of whole_parameters(), "
        "with writes=True to write."
    )


def _fits(tensor: torch.Tensor, spec: Any) -> bool:
    """Returns True for a plain number, or a shard of a DTensor like that of `spec`."""
    if not isinstance(tensor, TensorParallelShard):
        return tensor.dim() == 0 and not _C.is_sharded(tensor)
    own = tensor._brigade_origin.spec
    names = ("mesh", "placements", "shape")
    return own is spec or all(getattr(own, name) == getattr(spec, name) for name in names)


def _require_same_layout(name: str, writes: bool, args: tuple, kwargs: dict) -> None:
    """Raises NotImplementedError if shards are mixed with other tensors or written into these."""
    values = [kwargs.get("out"), *args, *kwargs.values()]
    lists = [value for value in values if isinstance(value, (list, tuple))]
    singles = [value for value in values if isinstance(value, torch.Tensor)]
    for group in itertools.zip_longest(*lists) if lists else [()]:  # elements of equal index
        tensors = [t for t in group if isinstance(t, torch.Tensor)] + singles
        shard = next((t for t in tensors if isinstance(t, TensorParallelShard)), None)
        if shard is None:
            continue
        is_plain_written = writes and not isinstance(tensors[0], TensorParallelShard)
        if is_plain_written or not all(_fits(t, shard._brigade_origin.spec) for t in tensors):
            _refuse(name, shard)


def _run_on_local(
    func: Callable, name: str, shards: list[TensorParallelShard], args: tuple, kwargs: dict
) -> Any:
    """Runs a function on local tensors. Reduces norms and `found_inf` over the DTensors' meshes."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if name == "_foreach_norm":
        return _norms_over_groups(args[0], result, *args[1:], **kwargs)
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        for group in _groups_of(shards):
            dist.all_reduce(args[1], dist.ReduceOp.MAX, group=group)
    return result


def _as_shards(result: Any, like: TensorParallelShard, name: str, args: tuple) -> Any:
    """Returns the result of a local operator; its elements as shards like those of a list."""
    if not isinstance(result, (list, tuple)):
        return _as_shard(result, like, name)
    lists = (each for each in args if isinstance(each, (list, tuple)))
    likes = next(lists, [like] * len(result))
    return type(result)(list(map(_as_shard, result, likes, [name] * len(result))))


def _as_shard(result: Any, like: Any, name: str) -> Any:
    """Returns the result of a local operator as a shard like `like`."""
    if not isinstance(result, torch.Tensor) or not isinstance(like, TensorParallelShard):
        return result
    if not _C.is_sharded(result):
        _refuse(name, like)
    return as_shard(result, like) if type(result) is torch.Tensor else result


class TensorParallelShard(TensorShard):
    """A shard of a tensor-parallel parameter, its gradient or optimizer state.

    `shape`, size(), numel() and full_tensor() are those of the DTensor. Results of operators that
    are not sharded, such as norms, are those of the DTensor, too: collective over both meshes.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, (name, rule) = kwargs or {}, _name_and_rule_of(func)
        shards = [t for t in tensors_in((args, kwargs)) if isinstance(t, TensorParallelShard)]
        if rule == "method" and args and args[0] is shards[0]:
            return getattr(args[0], name)(*args[1:], **kwargs)
        if rule == "like":
            return shards[0]._shard_of(func(shards[0]._empty(), *args[1:], **kwargs))
        if rule in ("unsharded", "local", "refused", "method"):
            in_place = name.endswith("_") and (name[-2] != "_" or name.startswith(("__i", "__set")))
            writes = in_place or kwargs.get("out") is not None
            if not writes and (rule == "unsharded" or any(map(_is_whole, shards))):
                args, kwargs = map_tensors((args, kwargs), _unsharded)
                return func(*args, **kwargs)
            if rule != "local":
                _refuse(name, shards[0])
            _require_same_layout(name, writes, args, kwargs)
        result = _run_on_local(func, name, shards, args, kwargs)
        return result if rule == "plain" else _as_shards(result, shards[0], name, args)

    @property
    def shape(self) -> torch.Size:
        return self._brigade_origin.spec.shape

    def _of_shape(self, name: str, *args: Any, **options: Any) -> Any:
        stride = self._brigade_origin.spec.stride
        of_meta = torch.empty_strided(self.shape, stride, dtype=self.dtype, device="meta")
        return getattr(of_meta, name)(*args, **options)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    @property
    def device_mesh(self) -> Any:
        root = self._brigade_origin.spec.mesh._get_root_mesh()
        return root[tuple(name for name, _ in self._placed())]

    @property
    def placements(self) -> tuple:
        return tuple(placement for _, placement in self._placed())

    def _placed(self) -> list[tuple]:
        """Returns (mesh dimension, placement), in the order of the root mesh."""
        spec = self._brigade_origin.spec
        meshes = super().device_mesh, spec.mesh
        names = [name for mesh in meshes for name in mesh.mesh_dim_names or [None] * mesh.ndim]
        order = spec.mesh._get_root_mesh().mesh_dim_names or ()
        placed = zip(names, (*super().placements, *spec.placements), strict=True)
        return sorted(placed, key=lambda pair: order.index(pair[0]) if pair[0] in order else -1)

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
for _names, _method in ((_DRAWS, "_draw"), (_OF_SHAPE, "_of_shape")):
    for _name in _names.split():
        _bound = functools.partialmethod(getattr(TensorParallelShard, _method), _name)
        setattr(TensorParallelShard, _name, _bound)


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


def _is_whole(shard: TensorParallelShard) -> bool:
    """Returns True for a parameter in a forward, or in whole_parameters()."""
    unit = shard._unit()
    in_forward = unit.root is not None and unit.root.native.is_in_forward
    if not in_forward and not shard.is_unsharded():
        return False
    return any(_C.alias_key(shard) == _C.alias_key(each) for each in unit.parameters)


def _unsharded(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, TensorParallelShard):
        return tensor
    return tensor.dtensor() if _is_whole(tensor) else tensor.full_tensor()


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
