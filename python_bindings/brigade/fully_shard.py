"""fully_shard() and FSDPModule: FSDP2 with brigade's collectives.

Each argument of fully_shard() is translated in:
    mesh, dp_mesh_dims, shard_placement_fn: _mesh_arguments.py
    module, ignored_params, block_numel_fn, reshard_after_forward: _sharded_units.py
    the others: fully_shard() itself
_prepare_parameters.py checks parameters and moves them to the mesh's device.
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

from brigade import _C, _compiling, _full_state_dict
from brigade._checks import (
    AssertedNotImplementedError,
    AssertedValueError,
    raises_on_all_ranks,
    require_count,
)
from brigade._mesh_arguments import group_and_num_shards, mesh_of_placements
from brigade._sharded_units import Root, Unit, convert, own_modules, split_reshards, unit_of
from brigade._tensor_parallel import TensorParallelParameter
from brigade._torch_patches import patch_torch

# torch before 2.15 lacks this class.
GradientReductionHandle: type = getattr(
    torch.distributed.fsdp, "GradientReductionHandle", UnshardHandle
)

# dtypes of reductions, by comm_hook.
_WIRE_DTYPES = {"fp16_compress": torch.float16, "bf16_compress": torch.bfloat16}


class _UnshardInPass(UnshardHandle):
    """Handle of unshard(async_op=True) during forward or backward; wait() unshards the unit.

    The all-gather begins with the prefetch, at the latest in wait().
    """

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        unit, self._unit = self._unit, None
        if unit is not None and unit.is_in_pass():
            unit.unshard()


class FSDPModule(_TorchFSDPModule):
    """Methods of a sharded module, in addition to those of its own class.

    fully_shard() makes the module's class a subclass of this one and of its own class. The class
    derives from torch's FSDPModule and has its methods; methods that brigade lacks raise
    NotImplementedError. "The unit" below is the module's FSDP unit; "the outermost module" is
    sharded and inside of no other sharded module. With `recurse`, a setter applies to the units of
    submodules, too.

    The first forward, or the first method marked with "makes the root", fixes the units: it is
    collective and raises on all ranks if the ranks' units differ.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        """Makes an unsharded module of the original class: slicing a Sequential needs that."""
        own = cls.__mro__[cls.__mro__.index(_TorchFSDPModule) + 1]
        return own(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        raise AssertedNotImplementedError(
            "fully_shard: a sharded module can't be copied.\nCopy it before fully_shard, and load "
            "full_state_dict() into the copy."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward with unsharded parameters. The outermost call is collective."""
        return unit_of(self).run(super().__call__, args, kwargs)

    _apply = convert

    def _get_fsdp_state(self) -> Unit:
        return unit_of(self)

    def _root(self) -> Root:
        return unit_of(self).require_root()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backward reduces the unit's gradients.

        With False, they accumulate on this rank, unsharded. Units may differ, identically on all
        ranks. Also calls set_requires_all_reduce() with the same value.

        For example:

            model.set_requires_gradient_sync(False)
            loss_fn(model(first)).backward()  # accumulates
            model.set_requires_gradient_sync(True)
            loss_fn(model(second)).backward()  # reduces the sum of both
        """
        sync = requires_gradient_sync
        self._set(recurse, synchronizes=sync, sums_over_replicas=sync)

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Changes fully_shard()'s `reshard_after_forward` from the next forward on.

        A number of ranks must be one that some unit had before the first forward.
        """
        for unit in self._units(recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backward reshards the unit. Default: True.

        With False, the unit stays unsharded until its shards change, so that the forwards of
        gradient accumulation issue no all-gather.
        """
        self._set(recurse, reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Sets whether unsharded parameters keep their memory and addresses while sharded.

        Default: False.
        """
        self._set(recurse, keeps_storage=keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """With False, backward does not unshard this unit: it reads no parameter of the unit.

        An embedding is an example. Default: True.
        """
        self._set(False, gathers_in_backward=unshard_in_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides this unit's gradient sums by `factor` instead of the number of ranks.

        Raises:
            ValueError: The factor is 0.
        """
        if factor == 0:
            raise ValueError("set_gradient_divide_factor: expected a number other than 0, found 0.")
        self._set(False, gradient_divisor=factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # the older name

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether backward reduces the unit's gradients over replicas, on a 2-D mesh.

        With False, backward reduces over the shard group only; the next backward with True adds
        these sums. Units may differ, identically on all ranks.
        """
        self._set(recurse, sums_over_replicas=requires_all_reduce)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Limits the number of reduce-scatters that hold unsharded gradients at the same time.

        The minimum over all units applies to all; default: 2.

        Raises:
            ValueError: The number is below 1.
        """
        if max_input_buffers < 1:
            raise ValueError(
                "set_reduce_scatter_max_input_buffers: expected a number >= 1, found "
                f"{max_input_buffers}."
            )
        for unit in self._units(recurse):
            unit.max_input_buffers = max_input_buffers
        if (root := unit_of(self).root) is not None:
            root.apply_max_input_buffers()

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets how many units forward prefetches when it uses this unit: ``len(modules)``.

        Unlike in torch, the prefetched units are the next ones in the order of use; only the number
        of modules counts. Makes the root.

        Raises:
            ValueError: A module is not sharded, or has another outermost module.
        """
        self._prefetch("forward_prefetch_depth", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets how many units backward prefetches; like set_modules_to_forward_prefetch()."""
        self._prefetch("backward_prefetch_depth", modules)

    def _prefetch(self, name: str, modules: list[FSDPModule]) -> None:
        if unit_of(self).native is None:
            return
        root = self._root()
        units = [unit_of(module) for module in modules]
        if any(unit is None or unit.root is not root for unit in units):
            raise ValueError(
                f"{name.removesuffix('_depth')}: expected sharded modules of the same outermost "
                "module.\nLeave out the others."
            )
        depth = sum(unit.native is not None for unit in units) or None
        self._set(False, **{name: depth})

    def _units(self, recurse: bool) -> list[Unit]:
        return unit_of(self).subtree() if recurse else [unit_of(self)]

    def _set(self, recurse: bool, **values: Any) -> None:
        for unit in self._units(recurse):
            if (settings := unit.settings()) is not None:
                for name, value in values.items():
                    setattr(settings, name, value)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """With True, finalize_backward() reduces gradients, not backward. Makes the root.

        Raises:
            RuntimeError: This is not the outermost module.
        """
        self._require_outermost("set_manual_backward_finalization")
        root = self._root()
        root.manual_finalization = enabled
        root.native.set_synchronizes(not enabled)

    def _require_outermost(self, name: str) -> None:
        own, outermost = unit_of(self), unit_of(self).outermost()
        if outermost is not own:
            raise RuntimeError(
                f"{name}: expected the outermost sharded module, found {own.describe()} inside of "
                f"{outermost.describe()}.\nCall it on the outermost module."
            )

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduces accumulated gradients of the units that synchronize. Collective.

        For use with set_manual_backward_finalization(True); otherwise without effect.

        Returns:
            With `async_op`, a completed handle: on devices the current stream already waits for
            the reduction, on CPUs the host has waited. None without `async_op`.

        Raises:
            RuntimeError: This is not the outermost module.
        """
        self._require_outermost("finalize_backward")
        root = unit_of(self).root
        if root is not None:
            root.finalize()
        return GradientReductionHandle() if async_op else None

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Makes the next forward wait for `event`, once.

        Record the event after the optimizer step if that runs on another stream.
        """
        unit_of(self).outermost().post_optim_event = event

    def gradient_slot(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Returns memory for a gradient, so that a custom autograd function avoids a copy.

        The function's backward fills the tensor and returns it. Not in torch.

        For example:

            slot = model.gradient_slot(weight)
            if slot is None:
                return inputs.t() @ gradient
            return torch.mm(inputs.t(), gradient, out=slot)

        Args:
            parameter: A parameter of any unit of the root, as the module has it in forward.

        Returns:
            An uninitialized tensor of the parameter's shape in the reduce dtype. None, if the
            function must allocate its gradient: no backward is running, the parameter is frozen or
            already has a gradient in this backward, or torch.autograd.grad() runs.

        Raises:
            ValueError: It is not a sharded parameter of the root.
        """
        root = unit_of(self).root
        return None if root is None else root.native.gradient_slot(parameter)

    def num_ranks_with(self, has_data: bool) -> int:
        """Returns the number of ranks that pass True. Collective; makes the root.

        For uneven inputs; torch's counterpart for DistributedDataParallel is join().

        For example:

            while model.num_ranks_with(batch is not None) > 0:
                if batch is None:
                    model.step_without_data()
                else:
                    loss_fn(model(batch)).backward()
                optimizer.step()
                optimizer.zero_grad()
                batch = next(batches, None)
        """
        return self._root().native.num_ranks_with(has_data)

    def step_without_data(self) -> None:
        """Takes part in a forward and backward of the other ranks without a batch. Collective.

        This rank contributes zeros, and its shards get their averaged gradients: step the
        optimizer as on the other ranks. Makes the root.
        """
        self._root().native.step_without_data()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshards this unit, without the units of submodules. Collective; makes the root.

        It stays unsharded until reshard(), or until its settings reshard it after its next forward
        or backward. Inside of a forward or backward, it is unsharded for its next use only, and
        ranks may differ.

        Args:
            async_op: Returns a handle; call its wait() before reading the parameters. The module's
                forward waits by itself.

        Raises:
            RuntimeError: The ranks' collectives differ; on all ranks.
        """
        unit = unit_of(self)
        if async_op and unit.is_in_pass():
            return _UnshardInPass(unit)
        unit.unshard()
        return UnshardHandle() if async_op else None

    def reshard(self, *, writes: bool = False) -> None:
        """Reshards this unit; without effect during its forward and backward.

        All ranks call it between the same forwards and backwards.

        Args:
            writes: The shards take the values of the unsharded parameters, which must be equal on
                all ranks. With False, changes are dropped.
        """
        unit_of(self).reshard(writes)

    @contextmanager
    def whole_parameters(self, *, writes: bool = False) -> Iterator[None]:
        """Context manager in which all units of the root are unsharded. Collective.

        Like FullyShardedDataParallel.summon_full_params(). An exception drops changes. Makes the
        root.

        Args:
            writes: Keeps changes of the parameters; make the same changes on all ranks.

        For example:

            with model.whole_parameters(writes=True), torch.no_grad():
                model.head.weight.zero_()
        """
        with self._root().unsharded(writes):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of all units to a total norm over all ranks. Collective.

        torch.nn.utils.clip_grad_norm_() works, too.

        Returns:
            The total norm before clipping, on the CPU.
        """
        root = self._root()
        parameters = [parameter for unit in root.units for parameter in unit.parameters]
        if any(isinstance(parameter, TensorParallelParameter) for parameter in parameters):
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type).cpu()
        return torch.tensor(root.native.clip_grad_norm(max_norm, norm_type), device="cpu")

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Returns copies of the unsharded parameters, on the CPU, and of the buffers. Collective.

        The values of state_dict() are sharded instead. Like torch's get_model_state_dict() with
        full_state_dict=True. Makes the root.

        Args:
            rank0_only: The other ranks return an empty dict and hold one full tensor at a time.

        Raises:
            NotImplementedError: `rank0_only`, and a unit's mesh has fewer ranks than the root's.

        For example:

            state = model.full_state_dict(rank0_only=True)
            if dist.get_rank() == 0:
                torch.save(state, "model.pt")
        """
        self._root()
        return _full_state_dict.gather_full(dict(self.state_dict()), rank0_only)

    def explain(self) -> str:
        """Returns a text of the units, their bytes, and a step's schedules and buffers.

        Evaluation and unshard() may allocate more than the planned buffers. Makes the root.
        """
        return self._root().native.explain()

    def sharding_statistics(self) -> dict[str, int]:
        """Returns counts of collectives since the first forward, and current bytes."""
        return self._root().native.statistics()

    def sharding_timeline(self) -> _C.ShardingTimeline:
        """Returns the times of all-gathers and reduce-scatters in the last sampled step.

        Steps 1 to 10 and every 100th step are sampled; see set_timeline_sample_rate(). print()
        shows a table; chrome_trace() returns JSON for Perfetto.
        """
        return self._root().native.timeline()

    def keep_unsharded(self, max_bytes: int) -> list[str]:
        """Keeps units unsharded from forward to backward, in `max_bytes` of additional memory.

        Calls set_reshard_after_forward(False) for the units whose all-gathers in backward took
        longest per byte in the last sampled step, on the slowest rank. Returns their names.
        Collective; call it between steps, after some training:

            loss_fn(model(x)).backward()
            model.keep_unsharded(4 * 2**30)

        Raises:
            RuntimeError: A rank has sampled no step.
        """
        root = self._root()
        units = [root.units[index] for index in root.native.units_to_keep(max_bytes)]
        for unit in units:
            unit.set_reshard_after_forward(False)
        return [unit.path for unit in units]

    def set_timeline_sample_rate(self, sample_rate: int) -> None:
        """Samples every `sample_rate`-th step after the first 10; 0: none. Default: 100.

        Raises:
            ValueError: The rate is below 0.
        """
        self._root().native.set_timeline_sample_rate(sample_rate)

    def set_stall_report_after(self, seconds: float) -> None:
        """Sets how long this rank waits for its peers before it warns, once.

        The warning names the unit and the position of the late ranks. 0: no warning. Default: half
        of the group's timeout, at most 60 s.

        Raises:
            ValueError: The time is below 0.
        """
        if seconds < 0:
            raise ValueError(
                f"set_stall_report_after: expected seconds >= 0, found {seconds}.\nPass 0 for no "
                "reports."
            )
        self._root().native.set_stall_report_after(datetime.timedelta(seconds=seconds))


def _lacks(self: FSDPModule, name: str, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"brigade.fully_shard lacks {name}().")


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
    "_set_unshard_async_op",  # all-gathers are always prefetched
    "reset_iter_state",  # any exception ends a forward
    "set_force_sum_reduction_for_comms",  # collectives always sum; one division follows
    "set_is_last_backward",  # every backward is finalized
    # A rank always contributes zeros for unused parameters. Unlike in torch, the gradient of a
    # parameter that no rank used is unchanged.
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
    broadcast_parameters: bool = True,
    block_numel_fn: Callable[[nn.Parameter], int] | None = None,
    comm_hook: str | None = None,
    reproducible: bool = False,
) -> nn.Module | list[nn.Module]:
    """Shards a module's parameters over ranks; replaces torch's fully_shard. Collective.

    The module becomes an FSDP unit: its parameters, except those of units inside of it, are
    unsharded together for forward and backward, and their gradients are reduced together. Shard
    submodules first. The first forward must run through the outermost module.

    For example:

        for block in model.blocks:
            brigade.fully_shard(block)
        brigade.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

    Differences from torch: parameters are ShardedParameter instead of DTensor. They are sharded in
    memory order, so that a rank may hold a part of a row. Rank 0's parameters are broadcast.
    Arguments after `dp_mesh_dims` are brigade's.

    Args:
        module: The module, or a list of modules that form one unit: unsharded for the first of
            their forwards, resharded after all of them have run or after the outermost forward.
        mesh: Default: all ranks. A 1-D mesh: its ranks share the parameters. A 2-D mesh:
            (replicas, shards). A submodule may have a mesh of some of the outermost module's ranks;
            the other ranks then have other meshes for their submodule there. Gradients are averaged
            over the mesh. Parameters and buffers on another device type move to the current device
            of the mesh's type. Without a mesh, CPU tensors move to the group's device if the group
            has no CPU backend; torch moves them to the accelerator.
        reshard_after_forward: True: backward all-gathers the parameters again. False: they stay
            unsharded. None (default): True except for the outermost module. A divisor n of the
            number of shards: each n consecutive ranks keep shards of the unsharded parameters, and
            backward all-gathers among them. n = 1 equals False; n = all equals True.
        shard_placement_fn: Function of a parameter. It returns None, a Shard, or a
            ShardPlacementResult, whose mesh becomes the unit's mesh and must be the same for all of
            the unit's parameters. `placements` reports the dimension of Shard, which has no other
            effect; see `block_numel_fn`.
        mp_policy: dtypes of compute, reductions, inputs and outputs. Parameters keep their dtype.
        offload_policy: None or OffloadPolicy(). CPU offload is not supported.
        ignored_params: Parameters that are neither sharded nor averaged.
        dp_mesh_dims: torch's DataParallelMeshDims: the dimensions `shard` and `replicate` of a
            larger mesh. Parameters must be plain tensors, which differ along other dimensions, or
            DTensors over other dimensions.
        prefetch_depth: The number of units whose all-gathers begin before they are needed.
        broadcast_parameters: Broadcasts rank 0's parameters.
        block_numel_fn: Function of a parameter; returns the number of consecutive elements that
            stay on one rank, for example ``p[0].numel()`` for whole rows or ``p.numel()`` for the
            whole parameter. Must be equal on all ranks.
        comm_hook: None, "fp16_compress" or "bf16_compress": gradients are sent and summed over
            ranks in that dtype. They still accumulate on this rank in the reduce dtype, which
            ``.grad`` has, too. Must be equal on all ranks.
        reproducible: Adds gradients in rank order on devices, too; on CPUs that is always so. Only
            the outermost module's value counts.

    Returns:
        `module`, whose class is now a subclass of FSDPModule and of its former class.

    Raises:
        ValueError: An argument is invalid, or the ranks' arguments or parameters differ; on all
            ranks.
        NotImplementedError: A feature is not supported; the other ranks raise ValueError.
    """
    group, num_shards = group_and_num_shards(mesh, dp_mesh_dims)
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    ignored = set(ignored_params or ())
    if shard_placement_fn is not None:
        with raises_on_all_ranks(group):
            named = [
                (prefix + name, parameter)
                for each in modules
                for prefix, child in own_modules(each)
                for name, parameter in child._parameters.items()
                if parameter is not None and parameter not in ignored
            ]
            placed = mesh_of_placements(named, shard_placement_fn, mesh)
        if placed is not mesh:
            group, num_shards = group_and_num_shards(placed)
            mesh = placed
    policy = mp_policy or MixedPrecisionPolicy()
    with raises_on_all_ranks(group):
        _require_separate(modules)
        if offload_policy is not None and type(offload_policy) is not OffloadPolicy:
            raise NotImplementedError(
                "fully_shard: offload_policy: expected None or OffloadPolicy(), found "
                f"{type(offload_policy).__name__}; offloading is not supported.\nLeave it out."
            )
        require_count(prefetch_depth, "prefetch_depth", least=0)
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            if not isinstance(value := getattr(policy, name), (torch.dtype, type(None))):
                raise ValueError(
                    f"fully_shard: mp_policy: expected {name} to be a torch.dtype, found "
                    f"{value!r}.\nPass a dtype, for example torch.bfloat16."
                )
        reshards, reshard_to = split_reshards(
            True if reshard_after_forward is None else reshard_after_forward, num_shards
        )
        if comm_hook is not None and comm_hook not in _WIRE_DTYPES:
            raise NotImplementedError(
                f"fully_shard: expected comm_hook to be one of {', '.join(_WIRE_DTYPES)}, found "
                f"{comm_hook!r}.\nCustom hooks are written in C++ (fsdp/sharded_model.h)."
            )
    options = {
        "reshard_to": reshard_to,
        "prefetch_depth": prefetch_depth,
        "param_dtype": policy.param_dtype,
        "reduce_dtype": policy.reduce_dtype,
        "broadcast_parameters": broadcast_parameters,
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
        getattr(mesh, "device_type", None),  # mesh-like objects may lack it
    )
    for each in modules:
        each.__class__ = _sharded_class(type(each))
    return module


fully_shard.state = unit_of  # as torch's: not None if sharded


def _require_separate(modules: list[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard: expected a module or a list of them, found an empty list.")
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"fully_shard: expected modules with a forward, found a {type(module).__name__}.\n"
                "Shard its elements, each as a unit or list(...) as one unit."
            )
        if unit_of(module) is not None:
            raise AssertedValueError(
                f"fully_shard: this {type(module).__name__} is sharded already."
            )
        inside = [other for other in module.modules() if any(other is each for each in modules)]
        if len(inside) > 1 or sum(module is each for each in modules) > 1:
            raise ValueError(
                f"fully_shard: {type(module).__name__} is in the list twice, or contains another "
                "module of the list.\nList only the outer module."
            )


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes calls of a method unshard parameters as calls of forward do. As torch's.

    Args:
        module: A sharded module; without effect on other modules.
        method_name: Name of a method that uses the module's parameters.

    Raises:
        ValueError: The module has no such method.

    For example:

        brigade.register_fsdp_forward_method(model, "encode")
        model.encode(inputs).sum().backward()
    """
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method "
            f"'{method_name}'.\nPass the name of a method to call instead of forward."
        )
    # Not the bound method: the module would hold a reference to itself.
    function = method.__func__

    @functools.wraps(function)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return unit.run(functools.partial(function, self), args, kwargs)

    object.__setattr__(module, method_name, types.MethodType(run, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Without effect: each outermost module has its own connections and streams.

    torch's shares streams between models that run alternately.
    """
