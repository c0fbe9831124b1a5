"""DistributedDataParallel: a replica of the module per rank, gradients averaged in backward.

The class derives from torch's, since frameworks and torch.compile check for torch's class.
brigade's reducer averages gradients. Buffers, join(), no_sync() and mixed precision are inherited.
torch's constructor does not run: it builds torch's reducer and is slow (80.8 ms for 8,000
parameters without its reducer; ours takes 9.9 ms).
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._utils import _get_device_index
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import distributed as torch_ddp
from torch.nn.parameter import is_lazy

from brigade import _checks, _compiling
from brigade._C import (
    Reducer,
    describe_tensor,
    require_agreement,
    suggest_control_device,
)
from brigade._checks import describe_error, require
from brigade._logger import Logger
from brigade._parameter_watch import ParameterWatch
from brigade._sharded_tensors import TensorShard

_MIB = 1024 * 1024
_TRACED = ("forward", "_pre_forward", "_post_forward")
_TorchDistributedDataParallel = torch_ddp.DistributedDataParallel


def _descriptions(named: dict[str, torch.Tensor]) -> list[str]:
    return [
        describe_tensor(name, tensor) + (", requires_grad" if tensor.requires_grad else "")
        for name, tensor in named.items()
    ]


def _through_sink(output: Any, copies: bool) -> Any:
    """Passes all tensors of `output` through one autograd node, like torch's _DDPSink.

    A backward from any output then visits the graph of all outputs. With `copies`, the caller may
    change the outputs in place without changing tensors that backward needs.
    """
    leaves, structure, is_rref = torch_ddp._tree_flatten_with_rref(output)
    indices = [
        i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.grad_fn is not None
    ]
    tensors = [leaves[i] for i in indices]
    if len(tensors) == 1 and copies:
        tensors = [tensors[0].clone()]
    elif len(tensors) > 1:
        tensors = _Sink.apply(copies, *tensors)
    for i, tensor in zip(indices, tensors, strict=True):
        leaves[i] = tensor
    return torch_ddp._tree_unflatten_with_rref(leaves, structure, is_rref)


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors) if copies else tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *gradients)


def _step_optimizers(parameter: torch.Tensor) -> None:
    for optimizer in parameter._in_backward_optimizers:
        optimizer.step()


def _checked_delayed(named: Any, hooked: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns delay_all_reduce_named_params as a list; checks both arguments."""
    _checks.require_type(Iterable, delay_all_reduce_named_params=named)
    delayed = list(named or [])
    missing = "delay_all_reduce_named_params" if named is None else "param_to_hook_all_reduce"
    require(
        (named is None) == (hooked is None),
        ValueError,
        "delay_all_reduce_named_params and param_to_hook_all_reduce belong together, but "
        f"{missing} is missing.\nPass both or none.",
    )
    for pair in delayed:
        match pair:
            case (str(), torch.Tensor()):
                continue
        raise TypeError(
            "DistributedDataParallel: delay_all_reduce_named_params must be (name, parameter) "
            f"pairs, got {pair!r:.100}."
        )
    _checks.require_type(torch.Tensor, param_to_hook_all_reduce=hooked)
    require(
        hooked is None or hooked.requires_grad,
        ValueError,
        "param_to_hook_all_reduce must require a gradient: its gradient hook starts the all-reduce."
        "\nPass the parameter whose gradient comes last.",
    )
    return delayed


def _is_transformed_by_tensor_parallelism(module: torch.nn.Module) -> bool:
    name = "torch.distributed.tensor.parallel.ddp"
    transform = getattr(sys.modules.get(name), "_reconstruct_dtensor", None)
    return transform is not None and any(
        transform in submodule._forward_pre_hooks.values() for submodule in module.modules()
    )


class DistributedDataParallel(_TorchDistributedDataParallel):
    """Averages a module's gradients over the ranks of a process group during backward.

    Replaces torch.nn.parallel.DistributedDataParallel: takes the same arguments and has the same
    methods; gradients have torch's bits on 2 ranks.

    Collective: every rank wraps the same module. Construction broadcasts rank 0's parameters and
    buffers. Each backward leaves the average over all ranks in ``.grad``.

    For example:

        model = brigade.DistributedDataParallel(net)
        for inputs, targets in batches:
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    Differences from torch: on CPUs, without a user's comm hook, a large ``.grad`` may share its
    bucket's storage; clone it to save or resize it. Arguments after `lazy_bucket_allocation` are
    brigade's. In ``_get_ddp_logging_data()`` backward excludes the loss, communication excludes the
    time between buckets, and ``has_error`` includes errors inside backward.

    Args:
        module: The module to train, on one type of device.
        device_ids: None, or a list of the module's device, if it is on one accelerator.
        output_device: Device of the outputs; default: ``device_ids[0]``.
        dim: Dimension along which torch scatters inputs; without effect on one device.
        broadcast_buffers: Deprecated: the default of `forward_sync_buffers`. If False, buffers are
            not broadcast at construction either.
        init_sync: Compares the ranks' parameters, buffers and options at construction and
            broadcasts rank 0's tensors.
        process_group: Default: the default group. Excludes `device_mesh`.
        bucket_cap_mb: Bucket cap in MiB; default: 1 for the first bucket, 25 for the others.
        find_unused_parameters: Walks the autograd graph of each forward's outputs. A parameter
            that this rank did not use contributes zeros; if no rank used it, ``.grad`` is
            unchanged. With False, an unused parameter is an error.
        check_reduction: Without effect; a FutureWarning says so.
        gradient_as_bucket_view: Makes ``.grad`` a view into its bucket, which saves a copy.
        static_graph: The graph and the used parameters are the same in each iteration.
        delay_all_reduce_named_params: (name, parameter) pairs whose gradients are all-reduced
            together after the gradient of `param_to_hook_all_reduce`.
        param_to_hook_all_reduce: The parameter whose gradient comes last; required with
            `delay_all_reduce_named_params`.
        mixed_precision: torch's _MixedPrecision. Excludes `find_unused_parameters`.
        device_mesh: A 1-D mesh, which gives the process group.
        skip_all_reduce_unused_params: With `find_unused_parameters`: skips the all-reduce of
            buckets that no rank used. Without effect with `static_graph`.
        bucket_cap_mb_list: Caps of the first, second, ... bucket in MiB; the last cap repeats.
            Replaces `bucket_cap_mb`.
        batched_grad_copy: Without effect: gradients are always copied in one pass.
        forward_sync_buffers: Broadcasts rank 0's buffers before each forward whose backward is
            synchronized, and in join(). Buffers keep their shapes of construction. Default: True.
        lazy_bucket_allocation: Without effect; a FutureWarning says so.
        check_module: Action if forward finds that the module's parameters have changed since
            construction: "error", "warn" or "off" (no check).
        bucket_plan: The result of bucket_plan() in an earlier run. Buckets are not rebuilt then.
            "auto": plans buckets for this model and its links in the first 10 iterations, and keeps
            them if they are faster than those of bucket_cap_mb. More than 2 ranks then get other
            bits, unless `reproducible` is set.
        one_backward_per_forward: Raises at the end of a backward that left parameters without
            gradients. By default the next forward raises.
        max_unconfirmed_iterations: On devices: the number of iterations, 0 to 32, that may deliver
            gradients before all ranks have confirmed their success. The other ranks see a failure
            after at most that many further iterations. The group is then closed, and training
            resumes from a checkpoint (docs/guides/failures.md). Without effect on CPUs, where ranks
            confirm before delivery.
        reproducible: Adds gradients in rank order and divides once. Bits then do not depend on
            buckets, views or the order of backward, and equal those of fully_shard() without
            replicas. Requires dense gradients; excludes comm hooks, `mixed_precision` and delayed
            parameters. Costs time on CPUs (docs/benchmarks.md).

    Raises:
        DistBackendError: A peer died or did not answer within the group's timeout.
        RuntimeError: No parameter requires a gradient; parameters are lazy or DTensors;
            `bucket_plan` does not fit; arguments exclude each other; the mesh is not 1-D; the ranks
            differ.
        TypeError: An argument has a wrong type.
        ValueError: Devices are not the module's; one of two arguments that belong together is
            missing; a cap or `check_module` is invalid.
    """

    # Defaults for pickles that lack these attributes.
    batched_grad_copy = False
    lazy_bucket_allocation = False
    bucket_bytes_cap_list: Sequence[int] = ()
    check_module = "error"
    _given_plan: list[list[int]] | None = None
    _plans_automatically = False
    _own_options: Mapping[str, Any] = {}  # reducer options that torch's reducer lacks

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: torch_ddp._MixedPrecision | None = None,
        device_mesh: dist.DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        check_module: Literal["error", "warn", "off"] = "error",
        bucket_plan: Sequence[Sequence[int]] | Literal["auto"] | None = None,
        one_backward_per_forward: bool = False,
        max_unconfirmed_iterations: int = 1,
        reproducible: bool = False,
    ) -> None:
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        group = _checks.process_group_of(process_group, device_mesh)
        compares_ranks = init_sync and group.size() > 1
        with _checks.raises_on_all_ranks(group if compares_ranks else None):
            if not isinstance(module, torch.nn.Module):
                raise TypeError(
                    "DistributedDataParallel: module must be a torch.nn.Module, got "
                    f"{module!r:.100}.\nPass an instance."
                )
            self._set_up_group(module, group, device_mesh)
            delayed = _checked_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
            require(
                mixed_precision is None or not find_unused_parameters,
                RuntimeError,
                "find_unused_parameters must be False with mixed_precision, which replaces the "
                "parameters in the autograd graph.\nSet static_graph=True instead, or use "
                "torch.autocast.",
            )
            require(
                check_module in ("error", "warn", "off"),
                ValueError,
                f"check_module must be 'error', 'warn' or 'off', got {check_module!r:.100}.",
            )
            self._set_up_parameters(module, delayed)
            self._set_up_devices(device_ids, output_device)
            self._set_up_state()
            self._set_up_buckets(bucket_cap_mb, bucket_cap_mb_list)
            self.check_module = check_module
            self._own_options = {
                "one_backward_per_forward": one_backward_per_forward,
                "max_unconfirmed_iterations": max_unconfirmed_iterations,
                "reproducible": reproducible,
            }
            for other, is_given in {
                "mixed_precision": mixed_precision is not None,
                "delay_all_reduce_named_params": delayed,
                "compiled_backward": self._use_python_reducer,
            }.items():
                require(
                    not reproducible or not is_given,
                    RuntimeError,
                    f"reproducible and {other} exclude each other: {other} does not add in rank "
                    "order.\nLeave out one of them.",
                )
            self._plans_automatically = bucket_plan == "auto"
            if bucket_plan is not None and not self._plans_automatically:
                self._given_plan = _checks.checked_plan(bucket_plan)
        self.dim = dim
        syncs_buffers_at_init = self._set_up_buffers(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.mixed_precision = mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        for name, value in {
            "check_reduction": check_reduction,
            "lazy_bucket_allocation": lazy_bucket_allocation,
        }.items():
            if value:
                warnings.warn(
                    f"DistributedDataParallel: {name} has no effect; leave it out.",
                    FutureWarning,
                    stacklevel=2,
                )
        if compares_ranks:  # the reducer compares its own options
            options = [
                f"forward_sync_buffers: {self.forward_sync_buffers}",
                f"find_unused_parameters: {find_unused_parameters}",
                f"static_graph: {static_graph}",
                f"one_backward_per_forward: {one_backward_per_forward}",
                f"mixed_precision: {mixed_precision}",
                f"delayed parameters: {len(delayed)}",
                f"bucket_plan: {'auto' if self._plans_automatically else 'given or by size'}",
            ]
            require_agreement(group, "DistributedDataParallel: option", options)
            require_agreement(
                group, "DistributedDataParallel: delayed parameter", _descriptions(dict(delayed))
            )
        if delayed:
            self._register_delay_all_reduce_hook(
                bucket_cap_mb=self.bucket_bytes_cap // _MIB,
                param_to_hook_all_reduce=param_to_hook_all_reduce,
                device_ids=self.device_ids,
            )
            if self._delay_all_reduce_all_params:
                return

        if compares_ranks:
            named = self._not_ignored(module.named_parameters())  # includes frozen ones
            require_agreement(group, "DistributedDataParallel: parameter", _descriptions(named))
            if self.forward_sync_buffers or syncs_buffers_at_init:
                named = self._not_ignored(module.named_buffers())
                require_agreement(group, "DistributedDataParallel: buffer", _descriptions(named))
        parameters, expect_sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, expect_sparse, names, static_graph, init_sync)
        if init_sync:  # also for a group of one, whose works may count the waits
            _sync_module_states(
                module=self.module,
                process_group=self.process_group,
                broadcast_bucket_size=self.broadcast_bucket_size,
                src=0,
                params_and_buffers_to_ignore=self.parameters_to_ignore,
                broadcast_buffers=syncs_buffers_at_init,
            )
        if mixed_precision is not None:
            self._set_up_mixed_precision(mixed_precision)
        if static_graph:
            self._set_static_graph()
        if self._use_python_reducer:
            _compiling.reduce_in_compiled_backward(self.bucket_bytes_cap // _MIB)
            self._register_accum_grad_hook()

    # ------------------------------------------------------------------ setup

    def _set_up_buffers(self, broadcast: bool | None, forward_sync: bool | None) -> bool:
        """Returns True if buffers are broadcast at construction, as in torch 2.13 and later."""
        if broadcast is not None and hasattr(_TorchDistributedDataParallel, "broadcast_buffers"):
            effect = (
                "False also skips the broadcast at construction"
                if forward_sync is None
                else "forward_sync_buffers overrides it"
            )
            warnings.warn(
                f"DistributedDataParallel: `broadcast_buffers` is deprecated; {effect}.\nUse "
                "forward_sync_buffers, which does not affect construction.",
                FutureWarning,
                stacklevel=3,
            )
        both = True if broadcast is None else broadcast
        self.forward_sync_buffers = both if forward_sync is None else forward_sync
        return both if forward_sync is None else True

    @property
    def broadcast_buffers(self) -> bool:
        """The name of forward_sync_buffers before torch 2.13."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _not_ignored(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in named if name not in self.parameters_to_ignore}

    def _set_up_group(
        self,
        module: torch.nn.Module,
        group: dist.ProcessGroup,
        device_mesh: dist.DeviceMesh | None,
    ) -> None:
        self.logger = None
        self.process_group = group
        first = next(module.parameters(), None)
        if first is not None:
            suggest_control_device(group, first.device)
        if device_mesh is None:
            return
        self.device_mesh = device_mesh
        if device_mesh._get_root_mesh() != device_mesh:
            # The other dimensions are for tensor parallelism.
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(module)

    def _set_up_parameters(
        self,
        module: torch.nn.Module,
        delayed: list[tuple[str, torch.nn.Parameter]],
    ) -> None:
        self.module = module
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore.update(name for name, _ in delayed)
        # torch's _build_params_for_reducer() names the module's own parameters ".weight".
        self.parameters_to_ignore.update(
            [f".{name}" for name in self.parameters_to_ignore if "." not in name]
        )
        self._delay_all_reduce_params = [parameter for _, parameter in delayed]
        named = self._not_ignored(module.named_parameters())
        self._module_parameters = list(named.values())
        require(
            delayed or any(parameter.requires_grad for parameter in self._module_parameters),
            RuntimeError,
            f"{type(module).__name__} has no parameter that requires a gradient: nothing to reduce."
            "\nUse the module without a wrapper.",
        )
        lazy = [name for name, parameter in named.items() if is_lazy(parameter)]
        require(
            not lazy,
            RuntimeError,
            f"{type(module).__name__} has uninitialized parameters: {_checks.some_of(lazy)}.\nRun "
            "one forward before wrapping the module, which gives them shapes.",
        )
        split = [name for name, parameter in named.items() if isinstance(parameter, DTensor)]
        require(
            not split,
            RuntimeError,
            f"{_checks.some_of(split[:1])} is a DTensor.\nPass the data-parallel dimension of its "
            "mesh as device_mesh, for example mesh['data'].",
        )
        sharded = [name for name, parameter in named.items() if isinstance(parameter, TensorShard)]
        require(
            not sharded,
            RuntimeError,
            f"DDP around a sharded unit: {_checks.some_of(sharded[:1])} is sharded.\nUse "
            "fully_shard() alone; on a 2-D mesh (replicas, shards) it averages over both.",
        )

    def _set_up_devices(self, device_ids: Sequence[Any] | None, output_device: Any) -> None:
        parameters = self._module_parameters or self._delay_all_reduce_params
        devices = dict.fromkeys(parameter.device for parameter in parameters)
        self.device = parameters[0].device
        self.device_type = self.device.type
        types = sorted({device.type for device in devices})
        require(
            len(types) == 1,
            ValueError,
            f"the parameters of {type(self.module).__name__} must be on one type of device, found "
            f"{', '.join(types)}.\nMove the module to one of them.",
        )
        self.is_multi_device_module = len(devices) > 1
        self.device_ids = None
        self.output_device = None
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            require(
                not device_ids and not output_device,
                ValueError,
                "device_ids and output_device require a module on one accelerator, found "
                f"{', '.join(sorted(map(str, devices)))} with device_ids={device_ids}, "
                f"output_device={output_device}.\nLeave them out.",
            )
            return
        require(
            len(device_ids) == 1,
            ValueError,
            f"device_ids must name one device, got {list(device_ids)}.\nStart one process per "
            "device.",
        )
        self.device_ids = [_get_device_index(device_ids[0], True)]
        output_device = device_ids[0] if output_device is None else output_device
        self.output_device = _get_device_index(output_device, True)

    def _set_up_buckets(
        self, bucket_cap_mb: float | None, bucket_cap_mb_list: list[float] | None
    ) -> None:
        _checks.require_type(Iterable, bucket_cap_mb_list=bucket_cap_mb_list)
        self.bucket_bytes_cap_list = [
            _checks.cap_in_bytes("bucket_cap_mb_list", cap) for cap in bucket_cap_mb_list or []
        ]
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not self.bucket_bytes_cap_list
        cap = 25 if bucket_cap_mb is None else bucket_cap_mb
        self.bucket_bytes_cap = _checks.cap_in_bytes("bucket_cap_mb", cap)
        if self.bucket_bytes_cap_list:
            self.bucket_bytes_cap = max(self.bucket_bytes_cap_list)
        self.broadcast_bucket_size = 250 * _MIB
        if hasattr(torch_ddp, "_BucketCapacityConfig"):  # an attribute of torch's wrapper
            self._bucket_config = torch_ddp._BucketCapacityConfig.create(
                bucket_cap_mb, bucket_cap_mb_list, self._use_python_reducer
            )

    def _set_up_state(self) -> None:
        """Sets the attributes that torch's inherited methods use."""
        self._use_python_reducer = torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer"
        self._require_manual_backward_finalization = False
        self.static_graph = False
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.use_side_stream_for_tensor_copies = True
        self._delay_grad_buffer: torch.Tensor | None = None
        self._delay_grad_views: list[torch.Tensor] = []
        self._delay_all_reduce_all_params = False
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._has_rebuilt_buckets = False
        self._lazy_init_ran = False
        self._accum_grad_hooks: list[Any] = []
        self._ddp_sink_clone = True

    def _set_up_mixed_precision(self, precision: torch_ddp._MixedPrecision) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import mixed_precision_hooks as hooks

        torch_ddp._setup_mixed_precision_params(precision, self.module)
        torch_ddp._cast_buffers(precision, self.module)
        self._mp_stream = torch.Stream()
        self._submodule_to_event = defaultdict(deque)
        self.module.register_forward_pre_hook(self._root_copy_hook, prepend=False, with_kwargs=True)
        for submodule in self.module.modules():
            submodule.register_forward_pre_hook(
                self._module_wait_for_copy_hook, prepend=False, with_kwargs=True
            )
        self.module.register_forward_hook(self._restore_after_inference, always_call=True)
        state = hooks._AllreduceUpcastHookState(
            ddp_weakref=weakref.ref(self), upcast_stream=torch.Stream()
        )
        self.register_comm_hook(state, hooks._reducer_allreduce_and_upcast_hook)
        self.reducer._set_mixed_precision_param_dtype(precision.param_dtype)

    def _root_copy_hook(self, *args: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        before = [gradient.data for gradient in gradients]
        super()._root_copy_hook(*args, **kwargs)  # casts gradients
        if not torch.is_grad_enabled():  # the submodules' hooks, which need a graph, find no event
            for gradient, data in zip(gradients, before, strict=True):
                gradient.data = data
            for events in self._submodule_to_event.values():
                events.popleft().wait(stream=torch.accelerator.current_stream())

    def _restore_after_inference(self, *args: Any) -> None:
        """Forward hook: restores the parameters if no backward does."""
        parameters = list(self.module.parameters())
        if torch.is_grad_enabled() or any(hasattr(p, "_ddp_mp_hook_state") for p in parameters):
            return
        for parameter in parameters:
            if hasattr(parameter, "_fp_param"):  # not ignored
                parameter.data = parameter._fp_param

    def _ddp_init_helper(
        self,
        parameters: list[torch.Tensor],
        expect_sparse: list[bool],
        names: dict[int, str],
        static_graph: bool,
        compare_ranks: bool = False,
    ) -> None:
        """Makes the reducer and logger. Communicates only with `compare_ranks`.

        torch's __setstate__() calls it, perhaps on one rank alone.
        """
        _compiling.leave_to_interpreter()
        if self._use_python_reducer:
            # The compiler traces torch's methods, not ours.
            for name in _TRACED:
                setattr(self, name, getattr(super(), name))
        if self.mixed_precision is not None:
            for index, parameter in enumerate(parameters):
                parameter._idx = index
        rebuilds = static_graph or not self.find_unused_parameters
        if self._given_plan is None:
            caps = self._bucket_caps()
            if not self.bucket_bytes_cap_list and rebuilds:
                # One bucket per dtype until buckets are rebuilt: the module's own collectives can't
                # come between those of two buckets.
                caps = [sys.maxsize]
            buckets, _ = dist._compute_bucket_assignment_by_size(parameters, caps, expect_sparse)
            buckets.reverse()  # backward visits the last layers first
        else:
            buckets = self._given_plan
        self.reducer = Reducer(
            parameters,
            buckets,
            [0] * len(buckets),  # limits, which have no effect
            self.process_group,
            expect_sparse,
            param_to_name_mapping=names,
            bucket_bytes_cap_list=self._bucket_caps(),
            rebuild_buckets=self._given_plan is None,
            find_unused_parameters=self.find_unused_parameters,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            static_graph=static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            verify_across_ranks=compare_ranks,
            use_python_reducer=self._use_python_reducer,
            **self._own_options,
        )
        self.reducer._expect_forwards()
        if self._plans_automatically:
            self.reducer._plan_automatically()
        syncs_batch_norm = any(isinstance(m, torch.nn.SyncBatchNorm) for m in self.module.modules())
        self.logger = Logger(
            self.reducer,
            parameters,
            self.process_group,
            bucket_bytes_cap=self._bucket_caps()[-1],
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.forward_sync_buffers,
            syncs_batch_norm,
            static_graph,
        )
        if syncs_batch_norm:
            self._passing_sync_batchnorm_handle(self.module)
        self._process = os.getpid()
        # Tensor parallelism replaces its parameters around each forward.
        watched = parameters
        if _is_transformed_by_tensor_parallelism(self.module):
            watched = [None if hasattr(p, "_st_info") else p for p in parameters]
        self._watch = ParameterWatch(
            self.module,
            reduced=watched,
            names=self.reducer.parameter_names,
            all_parameters=self._module_parameters,
            ignored=self.parameters_to_ignore,
        )

    def _bucket_caps(self) -> list[int]:
        """Returns the bucket caps in bytes."""
        if self.bucket_bytes_cap_list:
            return self.bucket_bytes_cap_list
        if self.bucket_bytes_cap_default:
            return [dist._DEFAULT_FIRST_BUCKET_BYTES, self.bucket_bytes_cap]
        return [self.bucket_bytes_cap]

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_watch", *_TRACED):  # __setstate__() makes new ones
            state.pop(name, None)
        if not hasattr(_TorchDistributedDataParallel, "broadcast_buffers"):
            # torch before 2.13 reads this if the pickle is loaded without brigade.
            state["broadcast_buffers"] = self.forward_sync_buffers
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "broadcast_buffers" in state:
            state.setdefault("forward_sync_buffers", state.pop("broadcast_buffers"))
        super().__setstate__(state)

    # ---------------------------------------------------------------- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; a backward through its outputs averages gradients.

        Collective except under no_sync(): every rank makes the same number of calls. Under
        no_grad() it broadcasts buffers, except in join(), so evaluate on one rank with `module`.
        Under no_grad() it also awaits the statuses of all iterations, which raises
        DistBackendError if a rank has failed (`max_unconfirmed_iterations`).
        """
        # Without a profiler, record_function() would slow down the code inside.
        is_profiled = torch.autograd._profiler_enabled()
        range_type = torch.autograd.profiler.record_function if is_profiled else nullcontext
        with range_type("DistributedDataParallel.forward"):
            if not torch.is_grad_enabled():
                self._await_statuses()
            if self._join_config.enable and not torch.is_grad_enabled():
                return self._forward_without_peers(*inputs, **kwargs)
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            if self._delay_all_reduce_all_params:
                outputs = self.module.forward(*inputs, **kwargs)
            else:
                outputs = self._run_ddp_forward(*inputs, **kwargs)
            return self._post_forward(outputs)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._logging_errors():
            if torch.is_grad_enabled() and self.require_backward_grad_sync:
                self._check_parameters()
            return super()._pre_forward(*inputs, **kwargs)

    def _forward_without_peers(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs a forward without collectives: joined ranks can't match one without gradients."""
        before = self._join_config, self.require_forward_param_sync
        self._join_config = _JoinConfig.construct_disabled_join_config()
        self.require_forward_param_sync = False
        try:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._run_ddp_forward(*inputs, **kwargs)
        finally:
            self._join_config, self.require_forward_param_sync = before

    def _check_parameters(self) -> None:
        if self._delay_all_reduce_all_params:
            return
        if os.getpid() != self._process:
            raise RuntimeError(
                f"DistributedDataParallel: the model was wrapped in process {self._process}, but "
                f"this is its fork {os.getpid()}, where the process group has no threads.\n"
                "Use model.module, or make a process group and a wrapper in this process."
            )
        if self.check_module == "error":
            self._watch.check()
        elif self.check_module == "warn":
            try:
                self._watch.check()
            except RuntimeError as error:
                warnings.warn(str(error), UserWarning, stacklevel=2)

    def _post_forward(self, output: Any) -> Any:
        if not self._delay_all_reduce_all_params:
            if self._check_sync_bufs_post_fwd():
                self._sync_buffers()
            will_reduce = torch.is_grad_enabled() and self.require_backward_grad_sync
            self.require_forward_param_sync = will_reduce
            if will_reduce:
                if self.find_unused_parameters and not self.static_graph:
                    output = _through_sink(output, copies=self._ddp_sink_clone)
                with self._logging_errors():
                    self.reducer.prepare_for_backward(list(torch_ddp._find_tensors(output)))
            elif torch.is_grad_enabled():
                self.reducer._note_local_forward(list(torch_ddp._find_tensors(output)))
        self._clear_grad_buffer()
        return output

    def _sync_buffers(self) -> None:
        # In join(), the source may not be rank 0; a user's hook broadcasts by itself.
        is_of_rank_0 = not self._join_config.enable and not hasattr(self, "buffer_hook")
        if torch.is_grad_enabled() and is_of_rank_0:
            self._assign_modules_buffers()
            buffers = tuple(self.modules_buffers)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffers):
                if buffers and self.reducer._send_buffers(buffers):
                    return
        # A rank that has failed must not receive a peer's bucket as a buffer.
        self.reducer._meet_peers()
        super()._sync_buffers()

    def _default_broadcast_coalesced(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._default_broadcast_coalesced(*args, **kwargs)
        except RuntimeError as error:
            if not self._delay_all_reduce_all_params:
                self.reducer._abort_group()
            raise dist.DistBackendError(
                f"DistributedDataParallel: rank {self.process_group.rank()}: the broadcast of "
                f"buffers failed; a peer died, exited or timed out: {error}\nSave a checkpoint and "
                "make a new process group."
            ) from error

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state dict, after all ranks have confirmed their iterations.

        As torch's, with the prefix "module.". On devices, gradients may be delivered before
        confirmation (`max_unconfirmed_iterations`). ``model.module.state_dict()`` does not wait.

        Raises:
            DistBackendError: A rank failed in an iteration; the parameters are not valid.
        """
        self._await_statuses()
        return super().state_dict(*args, **kwargs)

    def _await_statuses(self) -> None:
        if not self._delay_all_reduce_all_params:
            self.reducer._await_statuses()

    def can_continue(self) -> bool:
        """Returns True if the process group can be used after an error.

        False if the group's connections are closed (docs/guides/failures.md). On CPUs that happens
        after a peer died, exited or timed out, or if zeros can't replace the failed rank's
        gradients; on devices, after any failure. Then make a new group and wrap ``model.module``
        again.
        """
        return self._delay_all_reduce_all_params or self.reducer.can_continue()

    def bucket_plan(self) -> list[list[int]]:
        """Returns the parameter indices of each bucket, in launch order.

        The plan changes when buckets are rebuilt after the first iteration, and with
        bucket_plan="auto" in the first 12. Pass it to the constructor to resume training with equal
        bits.

        For example:

            plan = model.bucket_plan()
            model = brigade.DistributedDataParallel(net, bucket_plan=plan)
        """
        return self.reducer._bucket_plan()

    def sync_buffers(self, src: int = 0) -> None:
        """Broadcasts the buffers of rank `src`. Collective.

        After a forward, each rank has its own buffers. Call this before one rank saves or evaluates
        the model, and after join(). Also awaits the statuses of all iterations.

        Args:
            src: The source rank within the group.

        Raises:
            DistBackendError: A rank failed in an iteration, or in this broadcast.
        """
        if not self._delay_all_reduce_all_params:
            self.reducer._await_statuses()
            self.reducer._meet_peers()
        self._assign_modules_buffers()
        if self.modules_buffers:
            with torch.no_grad():
                self._default_broadcast_coalesced(authoritative_rank=src)

    # ------------------------------------------------------------------- join

    def _check_and_sync_module_buffers(self) -> None:
        """Matches _sync_buffers() of the other ranks on a rank that has joined."""
        if self._check_sync_bufs_pre_fwd():
            self.reducer._meet_peers()
        super()._check_and_sync_module_buffers()

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer._shadow_iteration(self._divide_by_initial_world_size)

    def _match_unused_params_allreduce(self) -> None:
        """Does nothing: _shadow_iteration() matches this all-reduce, too."""

    # ------------------------------------------------------------------ hooks

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        """All-reduces like torch's hook; backward also waits for the result."""
        self._delay_grad_buffer.div_(self.process_group.size())
        work = dist.all_reduce(self._delay_grad_buffer, group=self.process_group, async_op=True)
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)
        return grad

    def _setup_in_backward_optimizers(self) -> None:
        """Steps optimizers of torch's _apply_optimizer_in_backward() in backward.

        Works after any comm hook, on CPUs, too; torch's wrapper supports only its own all-reduce
        and only accelerators.
        """
        stepped = [p for p in self._module_parameters if hasattr(p, "_in_backward_optimizers")]
        if not stepped:
            return
        from torch.distributed.optim import apply_optimizer_in_backward

        for parameter in stepped:
            handles = apply_optimizer_in_backward.param_to_optim_hook_handle_map
            for handle in handles.get(parameter, []):
                handle.remove()
        self.reducer._step_in_backward(stepped, _step_optimizers)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replaces the all-reduce of each bucket by `hook`. Collective; only once.

        Ranks must register hooks of the same name at the same point of the program. For a hook that
        needs a second collective, see then_collective().

        Args:
            state: First argument of each call of the hook.
            hook: Function of `state` and a torch.distributed.GradBucket of undivided gradients. It
                returns a torch.futures.Future of the tensor that replaces the bucket's.

        Raises:
            TypeError: `hook` is not callable.
            ValueError: The type annotations of `hook` are not those above.
            DistBackendError: A peer failed.
            RuntimeError: A hook is registered already, or the ranks' hooks differ.
            NotImplementedError: optimize_ddp="python_reducer" and a hook of torch that needs a
                GradBucket. Hooks then get the tuple (gradient, parameter), as fp16_compress_hook
                and bf16_compress_hook support; built-in hooks have no effect, as in torch.

        For example:

            def average(state, bucket):
                work = dist.all_reduce(bucket.buffer(), async_op=True)
                size = dist.get_world_size()
                return work.get_future().then(lambda done: done.value()[0] / size)

            model.register_comm_hook(None, average)
        """
        with self._logging_errors():
            _checks.require_comm_hook(hook)
            if self._use_python_reducer:
                self._require_per_gradient(hook)
                self._comm_hooks.append((functools.partial(_compiling.apply_hook, hook), state))
            else:
                self.reducer._register_comm_hook(state, hook)
                self._comm_hooks.append((hook, state))
        self.logger._set_comm_hook_name(_checks.hook_name(hook))

    def _require_per_gradient(self, hook: Callable[..., Any]) -> None:
        """Compares ranks. Throws if a hook is registered, or if torch's hook needs a GradBucket."""
        require(
            not self._comm_hooks,
            RuntimeError,
            "DistributedDataParallel: register_comm_hook can only be called once.\nRegister one "
            "hook, which may call other hooks.",
        )
        name = _checks.hook_name(hook)
        require(
            name in ("fp16_compress_hook", "bf16_compress_hook")
            or not str(getattr(hook, "__module__", "")).startswith("torch.distributed.algorithms."),
            NotImplementedError,
            f"DistributedDataParallel: {name} needs a GradBucket, but with torch._dynamo.config."
            'optimize_ddp="python_reducer", a hook gets a gradient and its parameter.\nUse fp16_'
            "compress_hook or bf16_compress_hook, or set another optimize_ddp before wrapping.",
        )
        require_agreement(self.process_group, "DistributedDataParallel: comm hook", [name])

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        if not self._use_python_reducer:  # torch's hooks per gradient average without compression
            self.reducer._register_builtin_comm_hook(comm_hook_type)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _set_static_graph(self) -> None:
        with self._logging_errors():
            super()._set_static_graph()

    @contextmanager
    def _logging_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.logger is not None:
                self.logger.set_error_and_log(describe_error(error))
            raise
