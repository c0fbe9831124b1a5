"""Sharded training: each rank holds a shard of every parameter, in place of torch's fully_shard.

    import brigade

    for block in model.blocks:
        brigade.fully_shard(block)
    brigade.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

A sharded module is a unit: its parameters that no other unit has are unsharded when it runs, and
their gradients are reduced together. Parameters keep their shapes: in a forward or backward
operators see them unsharded, otherwise they act on this rank's shards.
"""

from __future__ import annotations

import datetime
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as _TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, UnshardHandle

from brigade import _C, _compiling, _sharded_state
from brigade._checks import failure_told_to_peers
from brigade._shardable_parameters import require_count
from brigade._sharded_units import Root, Unit, own_modules, split_reshards, unit_of
from brigade._sharding_mesh import group_of, mesh_of_placements
from brigade._torch_patches import patch_torch
from brigade._unit_conversion import convert

# Of torch 2.15 and later.
GradientReductionHandle: type = getattr(
    torch.distributed.fsdp, "GradientReductionHandle", UnshardHandle
)

_WIRE_DTYPES = {"fp16_compress": torch.float16, "bf16_compress": torch.bfloat16}


class _HandleInPass(UnshardHandle):
    """Of unshard() inside of a forward or backward, where units are gathered ahead anyway."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        unit, self._unit = self._unit, None
        if unit is not None and unit.is_in_pass():
            unit.unshard()


class FSDPModule(_TorchFSDPModule):
    """Methods that a sharded module has beside those of its own class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        """One of the module's own class, as slices of a Sequential are made."""
        own = cls.__mro__[cls.__mro__.index(_TorchFSDPModule) + 1]
        return own(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        raise NotImplementedError(
            "fully_shard: a sharded module can't be copied.\nCopy it before it is sharded, and "
            "load full_state_dict()."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In a forward of the root, which this opens unless it is inside of one."""
        return unit_of(self).run(super().__call__, args, kwargs)

    _apply = convert

    def _root(self) -> Root:
        """Made by the first call, of the outermost module so far. Collective then."""
        return unit_of(self).require_root()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards reduce its gradients; if not, they accumulate on this rank, unsharded.

        Units may differ, identically on all ranks: the others' are reduced meanwhile. Sets
        set_requires_all_reduce(), too.
        """
        sync = requires_gradient_sync
        self._set(recurse, synchronizes=sync, sums_over_replicas=sync)

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """From the next forward on. A number of ranks, as fully_shard() takes it, is one that
        some unit had before the first forward.
        """
        for unit in self._units(recurse):
            unit.set_reshards_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """False: it stays unsharded until its shards are changed, so that the next forward of
        several backwards issues no all-gather.
        """
        self._set(recurse, reshards_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """True: its unsharded parameters keep their memory, and so their addresses, while it is
        sharded.
        """
        self._set(recurse, keeps_storage=keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: this unit's backward reads none of its parameters, as an embedding's."""
        self._set(False, gathers_in_backward=unshard_in_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sums of this unit's gradients are divided by that, in place of the number of ranks."""
        if factor == 0:
            raise ValueError("set_gradient_divide_factor: expected a number, found 0.\nGive 1.")
        self._set(False, gradient_divisor=factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # the older name

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: on a mesh with replicas, backwards reduce its gradients over a shard group only,
        and the next one that reduces them over all adds these sums. Units may differ.
        """
        self._set(recurse, sums_over_replicas=requires_all_reduce)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """At most this many reductions hold memory for unsharded gradients at once: of all units
        together, the least that one of them was given (2 if none was).
        """
        if max_input_buffers < 1:
            raise ValueError(
                "set_reduce_scatter_max_input_buffers: expected 1 at least, found "
                f"{max_input_buffers}.\nGive 2, for instance."
            )
        for unit in self._units(recurse):
            unit.max_reducing = max_input_buffers
        if (root := unit_of(self).root) is not None:
            root.apply_max_reducing()

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """When this module is needed in forward, the all-gathers of the next units begin: as many
        as modules are given, in the order in which ranks use them. Makes the root.
        """
        self._prefetch("forward_prefetch_depth", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The same in backward."""
        self._prefetch("backward_prefetch_depth", modules)

    def _prefetch(self, name: str, modules: list[FSDPModule]) -> None:
        root = self._root()
        units = [unit_of(module) for module in modules]
        if any(unit is None or unit.root is not root for unit in units):
            raise ValueError(
                f"{name.removesuffix('_depth')}: expected modules that are sharded below the same "
                "outermost one.\nLeave out the others."
            )
        depth = sum(unit.native is not None for unit in units) or None
        self._set(False, **{name: depth})

    def _units(self, recurse: bool) -> list[Unit]:
        return unit_of(self).with_those_below() if recurse else [unit_of(self)]

    def _set(self, recurse: bool, **values: Any) -> None:
        for unit in self._units(recurse):
            if (settings := unit.settings()) is not None:
                for name, value in values.items():
                    setattr(settings, name, value)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """True: gradients are reduced by finalize_backward(), not by backwards. Makes the root.

        Raises:
            RuntimeError: this is not the outermost module, as torch's.
        """
        self._require_outermost("set_manual_backward_finalization")
        self._root().set_finalizes_by_hand(enabled)

    def _require_outermost(self, name: str) -> None:
        own, outermost = unit_of(self), unit_of(self).outermost()
        if outermost is not own:
            raise RuntimeError(
                f"{name}: expected the outermost module that is sharded, found "
                f"{own.describe()} inside of {outermost.describe()}.\nCall it of that."
            )

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Collective: reduces accumulated gradients, of units that are to be synchronized.

        Returns:
            With `async_op`, a handle for torch's programs, which is complete: on devices the
            current stream waits for the sums; on CPUs the host has waited.

        Raises:
            RuntimeError: this is not the outermost module, as torch's.
        """
        self._require_outermost("finalize_backward")
        root = unit_of(self).root
        if root is not None:  # else no forward has run
            root.finalize()
        return GradientReductionHandle() if async_op else None

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The next forward waits once for the event, recorded after the optimizer's step on a
        stream that the current one does not wait for.
        """
        unit_of(self).outermost().post_optim_event = event

    def gradient_slot(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Memory that a custom autograd function may fill with a gradient and return, uncopied::

            slot = model.gradient_slot(weight)
            if slot is None:
                return inputs.t() @ gradient
            return torch.mm(inputs.t(), gradient, out=slot)

        Args:
            parameter: as its module has it in forward, of any unit of the root.

        Returns:
            A tensor of the parameter's shape in the reduce dtype, with undefined values; None if
            the function is to return its own tensor: the parameter is frozen or has a gradient in
            this backward already, the backward returns its gradients (torch.autograd.grad), or
            none is running.

        Raises:
            ValueError: it is no parameter that was sharded below the root.
        """
        root = unit_of(self).root
        return None if root is None else root.native.gradient_slot(parameter)

    def num_ranks_with(self, has_data: bool) -> int:
        """Collective: how many ranks have a batch for the next step; this one does, or not."""
        return self._root().native.num_ranks_with(has_data)

    def step_without_data(self) -> None:
        """In place of a forward and a backward, on a rank that has no batch while others do.

        The optimizer steps as on the others: this rank's parts get their gradients, too.
        """
        self._root().native.step_without_data()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Collective: this unit, without those below it, stays unsharded until reshard().

        Or until its settings reshard it: after its next forward or backward. Inside of a forward
        or backward it is unsharded for its next use only, and ranks may differ.

        Args:
            async_op: Returns a handle to wait for before its parameters are read; its forward
                waits by itself. Inside of a forward or backward the all-gather begins as
                `prefetch_depth` says, at the latest in wait().

        Raises:
            RuntimeError: Ranks do something else; on all of them.
        """
        unit = unit_of(self)
        if async_op and unit.is_in_pass():
            return _HandleInPass(unit)
        unit.unshard()
        return UnshardHandle() if async_op else None

    def reshard(self, *, writes: bool = False) -> None:
        """Shards this unit again; all ranks call it between the same forwards and backwards.

        Without effect in its forward and its backward.

        Args:
            writes: Keeps the values of its unsharded parameters, equal on all ranks.
        """
        unit_of(self).reshard(writes)

    @contextmanager
    def whole_parameters(self, *, writes: bool = False) -> Iterator[None]:
        """Unshards all units of the root inside; `writes`: keeps changes of their values."""
        root = self._root()
        root.unshard(writes)
        try:
            yield
        except BaseException:
            root.reshard(drops_writes=True)
            raise
        root.reshard(drops_writes=False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of all units by their norm over all ranks, which it returns."""
        norm = self._root().native.clip_grad_norm(max_norm, norm_type)
        return torch.tensor(norm, device="cpu")

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Collective: copies of unsharded parameters, in their own dtype, and of buffers.

        `rank0_only`: others return an empty dict, and have one unit in memory at a time.
        """
        self._root()
        return _sharded_state.gather_nest(dict(self.state_dict()), rank0_only)

    def explain(self) -> str:
        """Units, bytes, and the schedules and buffers of a step, in words."""
        return self._root().native.explain()

    def sharding_statistics(self) -> dict[str, int]:
        """Counts since the first forward, bytes as they are now."""
        return self._root().native.statistics()

    def sharding_timeline(self) -> _C.ShardingTimeline:
        """Times of all-gathers and reductions in the last sampled step: the first 10 are sampled,
        and every 100th (set_timeline_sample_rate()). print() shows a table.
        """
        return self._root().native.timeline()

    def set_timeline_sample_rate(self, sample_rate: int) -> None:
        """Samples each `sample_rate`-th step beside the first 10; 0: none. ValueError below 0."""
        self._root().native.set_timeline_sample_rate(sample_rate)

    def set_stall_report_after(self, seconds: float) -> None:
        """A rank that has waited that long for its peers warns once, and names the unit and the
        position of the late ranks. 0: never; the default is half of the group's timeout, 60 s at
        most. ValueError below 0.
        """
        if seconds < 0:
            raise ValueError(
                f"set_stall_report_after: expected 0 at least, found {seconds}.\nGive 0 for never."
            )
        self._root().native.set_stall_report_after(datetime.timedelta(seconds=seconds))


def _lacks(self: FSDPModule, name: str, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"brigade.fully_shard lacks {name}() so far.")


def _without_effect(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
    """Without effect."""


for _name in (
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_symm_mem_for_comm",
):
    setattr(FSDPModule, _name, functools.partialmethod(_lacks, _name))

for _name in (
    "_set_unshard_async_op",  # all-gathers always begin ahead of their need
    "reset_iter_state",  # any exception ends a forward
    "set_force_sum_reduction_for_comms",  # collectives always sum, and one division follows
    "set_is_last_backward",  # every backward is complete by itself
    # A rank contributes zeros for parameters that it did not use. The gradient of a parameter that
    # no rank used stays as it is, also where torch's would be zeros.
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",  # all-gathers and reductions use separate connections
):
    setattr(FSDPModule, _name, _without_effect)


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    prefetch_depth: int = 1,
    broadcasts_parameters: bool = True,
    block_numel_fn: Callable[[nn.Parameter], int] | None = None,
    comm_hook: str | None = None,
    reproducible: bool = False,
) -> nn.Module | list[nn.Module]:
    """Shards the parameters of a module that are in no unit below it. Collective.

    Args:
        module: shard modules below it first; forward begins at the outermost one. A list is one
            unit: unsharded for the first of their forwards, and resharded when all have run, or
            the outermost module's forward ends.
        mesh: of one dimension, whose ranks share the parameters (default: all ranks); of two,
            (replicas, shards): shards along the second. A module below the outermost one may
            have its own mesh of some of its ranks; other ranks then have other meshes for their
            module there. Gradients are averaged over the mesh. A module on other devices than
            the mesh's type moves to the current one of that type, with its buffers. Without a
            mesh it moves, to the group's device, only if the group can't send its tensors;
            torch's moves it to the accelerator.
        reshard_after_forward: whether it is resharded between forward and backward. None:
            unless it is the outermost. A number n of ranks, a divisor of those that share the
            parameters: n consecutive ranks, those of a host for instance, keep shards of it in
            between, and backward gathers among these; all of them: True; 1: False.
        shard_placement_fn: of a parameter: None or torch's Shard, without effect, since shards
            are cut in memory order (block_numel_fn says what is not cut), or a
            ShardPlacementResult with the mesh of the unit, the same for all of its parameters.
        mp_policy: dtypes of compute, of gradient sums and of outputs. Parameters keep theirs.
        offload_policy: not so far.
        ignored_params: left as they are, separately on every rank.
        dp_mesh_dims: torch's DataParallelMeshDims: names of the dimensions `shard` and
            `replicate` of a larger mesh along which parameters are identical. Along the others
            ranks have their own parameters, which are plain tensors.
        prefetch_depth: number of units whose all-gathers begin ahead of their need.
        broadcasts_parameters: all ranks begin with the parameters of rank 0.
        block_numel_fn: of a parameter, the number of elements that are never cut, such as a
            row's; its numel for one rank to hold all of it. Equal on all ranks.
        comm_hook: 'fp16_compress' or 'bf16_compress': gradients are sent and summed over ranks,
            over replicas too, in that dtype; they accumulate on this rank in the reduce dtype, as
            does `.grad`. Equal on all ranks.
        reproducible: of the outermost module: on devices, too, gradients are added in rank
            order, as they always are on CPUs.

    Returns:
        The same, whose class now derives from its own and from FSDPModule.

    Raises:
        ValueError: bad arguments, or ranks differ; on all ranks.
        NotImplementedError: names a feature that brigade lacks.
    """
    group, num_shards = group_of(mesh, dp_mesh_dims)
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    ignored = set(ignored_params or ())
    if shard_placement_fn is not None:
        with failure_told_to_peers(group):
            named = [
                (prefix + name, parameter)
                for each in modules
                for prefix, child in own_modules(each)
                for name, parameter in child._parameters.items()
                if parameter is not None and parameter not in ignored
            ]
            placed = mesh_of_placements(named, shard_placement_fn, mesh)
        if placed is not mesh:
            group, num_shards = group_of(placed)
            mesh = placed
    policy = mp_policy or MixedPrecisionPolicy()
    with failure_told_to_peers(group):
        _require_separate(modules)
        if offload_policy is not None and type(offload_policy) is not OffloadPolicy:
            raise NotImplementedError(
                "fully_shard: offload_policy: expected none, since parameters stay where they "
                f"are, found {type(offload_policy).__name__}.\nLeave it out."
            )
        require_count(prefetch_depth, "prefetch_depth", least=0)
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            if not isinstance(value := getattr(policy, name), (torch.dtype, type(None))):
                raise ValueError(
                    f"fully_shard: mp_policy: expected {name} to be a torch.dtype, found "
                    f"{value!r}.\nGive torch.bfloat16, for instance."
                )
        reshards, reshards_to = split_reshards(
            True if reshard_after_forward is None else reshard_after_forward, num_shards
        )
        if comm_hook is not None and comm_hook not in _WIRE_DTYPES:
            raise NotImplementedError(
                f"fully_shard: expected a comm hook of {', '.join(_WIRE_DTYPES)}, found "
                f"{comm_hook!r}.\nOne of your own is written in C++ (fsdp/sharded_model.h)."
            )
    options = {
        "reshard_to": reshards_to,
        "prefetch_depth": prefetch_depth,
        "param_dtype": policy.param_dtype,
        "reduce_dtype": policy.reduce_dtype,
        "broadcast_parameters": broadcasts_parameters,
        "wire_dtype": None if comm_hook is None else _WIRE_DTYPES[comm_hook],
        "reproducible": reproducible,
    }
    _compiling.leave_to_interpreter()
    patch_torch()
    Unit(
        modules,
        group,
        num_shards,
        mesh if isinstance(mesh, DeviceMesh) and dp_mesh_dims is None else None,
        options,
        policy,
        None if reshard_after_forward is None else reshards,
        ignored,
        block_numel_fn,
        getattr(mesh, "device_type", None),  # none of stand-ins for a mesh
    )
    for each in modules:
        each.__class__ = _sharded_class(type(each))
    return module


def _require_separate(modules: list[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard: expected a module, or several, found an empty list.")
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"fully_shard: expected modules that are called, found a {type(module).__name__}, "
                "which has no forward.\nShard what is in it: each by itself, or list(...) as one "
                "unit."
            )
        if unit_of(module) is not None:
            raise ValueError("fully_shard: this module is sharded already.")
        inside = [other for other in module.modules() if any(other is each for each in modules)]
        if len(inside) > 1 or sum(module is each for each in modules) > 1:
            raise ValueError(
                f"fully_shard: {type(module).__name__} is in the list twice, or has another "
                "module of it inside.\nName the outer one alone."
            )


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets a method be called in place of forward: parameters are unsharded inside of it.

    Args:
        module: sharded by fully_shard; without effect on others.
        method_name: of one that computes with the module's own parameters, as ``encode``.

    Raises:
        ValueError: the module has no such method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method "
            f"'{method_name}'.\nName one that takes forward's place."
        )
    # Of its class, so that the module holds nothing that holds the module.
    function = method.__func__

    @functools.wraps(function)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return unit.run(functools.partial(function, self), args, kwargs)

    object.__setattr__(module, method_name, types.MethodType(run, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Without effect: of torch's, models that run in turns share streams by it.

    Each of brigade's models has connections of its own.
    """
