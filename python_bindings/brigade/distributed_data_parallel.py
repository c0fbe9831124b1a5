"""DistributedDataParallel: one copy of a module per rank, gradients averaged in backward.

The class derives from torch's and has its parameters and methods, since frameworks and the
compiler ask for torch's class. brigade's reducer handles gradients; the rest (buffers, join,
no_sync, casts of mixed precision) is inherited. torch's constructor is not run: for 8,000
parameters it takes 80.8 ms without a reducer to build; ours takes 9.9 ms in all.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from brigade._checks import require
from brigade._logger import Logger
from brigade._parameter_watch import ParameterWatch

_MIB = 1024 * 1024
_DEFAULT_BUCKET_CAP_MB = 25
_BROADCAST_BYTES = 250 * _MIB
_TRACED = ("forward", "_pre_forward", "_post_forward")
_TorchDistributedDataParallel = torch_ddp.DistributedDataParallel


def _descriptions(named: dict[str, torch.Tensor]) -> list[str]:
    return [
        describe_tensor(name, tensor) + (", requires_grad" if tensor.requires_grad else "")
        for name, tensor in named.items()
    ]


def _profiler_range(name: str) -> AbstractContextManager[Any]:
    """Torch's own annotation slows the code inside down, even without a profiler."""
    if torch.autograd._profiler_enabled():
        return torch.autograd.profiler.record_function(name)
    return nullcontext()


def _tied(output: Any, copies: bool) -> Any:
    """A stand-in for any nest of tensors: a backward from one of them goes through all.

    `copies`: the tensors are copies, which the caller may change in place, as torch's; what
    their backward needs is left alone.
    """
    leaves, structure, is_rref = torch_ddp._tree_flatten_with_rref(output)
    places = [
        i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.grad_fn is not None
    ]
    tensors = [leaves[i] for i in places]
    if len(tensors) == 1 and copies:
        tensors = [tensors[0].clone()]
    elif len(tensors) > 1:
        tensors = _Tie.apply(copies, *tensors)
    for i, tensor in zip(places, tensors, strict=True):
        leaves[i] = tensor
    return torch_ddp._tree_unflatten_with_rref(leaves, structure, is_rref)


class _Tie(torch.autograd.Function):
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


def _delayed(named: Any, hooked: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """delay_all_reduce_named_params as a list, checked with param_to_hook_all_reduce."""
    _checks.require_type(Iterable, delay_all_reduce_named_params=named)
    delayed = list(named or [])
    missing = "delay_all_reduce_named_params" if named is None else "param_to_hook_all_reduce"
    require(
        (named is None) == (hooked is None),
        ValueError,
        "delay_all_reduce_named_params and param_to_hook_all_reduce belong together, but "
        f"{missing} is missing.\nGive both or none.",
    )
    for pair in delayed:
        match pair:
            case (str(), torch.Tensor()):
                continue
        raise TypeError(
            "DistributedDataParallel: delay_all_reduce_named_params must have pairs of a name "
            f"and a parameter, got {pair!r:.100}."
        )
    _checks.require_type(torch.Tensor, param_to_hook_all_reduce=hooked)
    require(
        hooked is None or hooked.requires_grad,
        ValueError,
        "param_to_hook_all_reduce must require a gradient, which its hook waits for; it is frozen."
        "\nGive the parameter whose gradient comes last.",
    )
    return delayed


def _is_transformed_by_tensor_parallelism(module: torch.nn.Module) -> bool:
    name = "torch.distributed.tensor.parallel.ddp"
    transform = getattr(sys.modules.get(name), "_reconstruct_dtensor", None)
    return transform is not None and any(
        transform in submodule._forward_pre_hooks.values() for submodule in module.modules()
    )


class DistributedDataParallel(_TorchDistributedDataParallel):
    """Data-parallel training of a module over the ranks of a process group.

    Collective: every rank wraps the same module. Afterwards all hold rank 0's parameters and
    buffers, and each backward leaves the average over all ranks in ``.grad``. On the CPU, without
    a comm hook of the user's, a large gradient may share its bucket's storage; clone it to save or
    resize it.

    Args:
        broadcast_buffers: Deprecated. Stands for forward_sync_buffers where that is None; False
            then also keeps buffers from being sent at construction.
        init_sync: Compares ranks now and gives them rank 0's tensors.
        bucket_cap_mb: Size of a bucket in MiB; default: 1 for the first, then 25.
        find_unused_parameters: A parameter that the outputs do not depend on counts as zero in
            the average; if no rank used it, its gradient stays as it was. If False, it is an
            error. Costs a walk of the graph per forward.
        check_reduction: Without effect.
        skip_all_reduce_unused_params: With find_unused_parameters: buckets that no rank uses are
            not reduced. Without effect with static_graph.
        bucket_cap_mb_list: Sizes of the first, second, ... bucket in MiB; the last one repeats.
            Replaces bucket_cap_mb.
        batched_grad_copy: Without effect: gradients always enter a bucket in one pass, with the
            bits of torch's default.
        forward_sync_buffers: Rank 0's buffers, of the shapes at construction, are broadcast
            before each forward that will be reduced, and by join(). Default: True.
        lazy_bucket_allocation: Without effect: buckets keep their memory.
        check_module: Action of a forward that finds other parameters in the module than were
            wrapped: "error", "warn" or "off", which does not look.
        bucket_plan: The result of bucket_plan() of an earlier run; buckets are not rebuilt then.
        one_backward_per_forward: A backward that leaves gradients out is an error when it ends,
            not in the next forward.
        max_unconfirmed_iterations: On devices: the number of iterations, 0 to 32, that may be
            delivered before all ranks are known to have ended them, when the next one begins. A
            rank's failure raises on the others at most that many iterations later; then the
            process group is closed, and training resumes from a checkpoint (docs/recovery.md).
            Without effect on the CPU, where ranks wait for each other before delivery.
        reproducible: Gradients are added in rank order and divided once, so that bits do not
            depend on buckets, rebuilds, views or the order of backward, and equal those of
            fully_shard() without replicas. Of dense gradients, without comm hook, mixed_precision
            or delayed parameters. On CPUs it costs time (docs/status.md).
        others: As torch's.

    Raises:
        DistBackendError: A peer has died, or did not come in time.
        RuntimeError: Nothing to train, lazy parameters, a DTensor, a bucket_plan that does not
            fit, arguments that exclude each other, a mesh of several dimensions, or ranks differ.
        TypeError: Arguments of a wrong type.
        ValueError: Devices that are not the module's, one of two arguments that belong together,
            an invalid size or check_module.
    """

    # Defaults for older pickles.
    batched_grad_copy = False
    lazy_bucket_allocation = False
    bucket_bytes_cap_list: Sequence[int] = ()
    check_module = "error"
    _given_plan: list[list[int]] | None = None
    _own_options: Mapping[str, Any] = {}  # of the reducer, which torch's has not

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
        bucket_plan: Sequence[Sequence[int]] | None = None,
        one_backward_per_forward: bool = False,
        max_unconfirmed_iterations: int = 1,
        reproducible: bool = False,
    ) -> None:
        # torch's own constructor would make a reducer of torch's.
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        group = _checks.process_group_of(process_group, device_mesh)
        compares_ranks = init_sync and group.size() > 1
        with _checks.failure_told_to_peers(group if compares_ranks else None):
            if not isinstance(module, torch.nn.Module):
                raise TypeError(
                    "DistributedDataParallel: module must be a torch.nn.Module, got "
                    f"{module!r:.100}.\nGive an instance."
                )
            self._set_up_group(module, group, device_mesh)
            delayed = _delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
            require(
                mixed_precision is None or not find_unused_parameters,
                RuntimeError,
                "find_unused_parameters must be False with mixed_precision, which swaps the "
                "parameters that are looked for in the graph.\nSet static_graph=True instead, or "
                "use torch.autocast.",
            )
            require(
                check_module in ("error", "warn", "off"),
                ValueError,
                f"check_module must be one of error, warn, off, got {check_module!r:.100}.\nLeave "
                "it out for 'error'.",
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
                    f"reproducible can't be given with {other}, whose sums are not in the order of "
                    "the ranks.\nLeave out one of them.",
                )
            self._given_plan = None if bucket_plan is None else _checks.plan_of(bucket_plan)
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
        if compares_ranks:  # the reducer compares the others
            options = [
                f"forward_sync_buffers = {self.forward_sync_buffers}",
                f"find_unused_parameters = {find_unused_parameters}",
                f"static_graph = {static_graph}",
                f"one_backward_per_forward = {one_backward_per_forward}",
                f"mixed_precision = {mixed_precision}",
                f"delayed parameters = {len(delayed)}",
            ]
            require_agreement(group, "option", options)
            require_agreement(group, "delayed parameter", _descriptions(dict(delayed)))
        if delayed:
            self._register_delay_all_reduce_hook(
                bucket_cap_mb=self.bucket_bytes_cap // _MIB,
                param_to_hook_all_reduce=param_to_hook_all_reduce,
                device_ids=self.device_ids,
            )
            if self._delay_all_reduce_all_params:
                return

        if compares_ranks:
            named = self._not_ignored(module.named_parameters())  # frozen ones, too
            require_agreement(group, "parameter", _descriptions(named))
            if self.forward_sync_buffers or syncs_buffers_at_init:
                named = self._not_ignored(module.named_buffers())
                require_agreement(group, "buffer", _descriptions(named))
        parameters, expect_sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, expect_sparse, names, static_graph, init_sync)
        if compares_ranks:
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
        """Returns whether buffers are synced at construction, as torch 2.13 and later."""
        if broadcast is not None and hasattr(_TorchDistributedDataParallel, "broadcast_buffers"):
            effect = (
                "which also keeps buffers from being synced at construction if it is False"
                if forward_sync is None
                else "and without effect beside forward_sync_buffers"
            )
            warnings.warn(
                f"DistributedDataParallel: `broadcast_buffers` is deprecated, {effect}; use "
                "forward_sync_buffers, which leaves that sync alone.",
                FutureWarning,
                stacklevel=3,
            )
        both = True if broadcast is None else broadcast
        self.forward_sync_buffers = both if forward_sync is None else forward_sync
        return both if forward_sync is None else True

    @property
    def broadcast_buffers(self) -> bool:
        """Torch's name before 2.13 of forward_sync_buffers."""
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
            # The other dimensions are tensor parallelism's.
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
        self._delay_all_reduce_params = [parameter for _, parameter in delayed]
        named = self._not_ignored(module.named_parameters())
        self._module_parameters = list(named.values())
        require(
            delayed or any(parameter.requires_grad for parameter in self._module_parameters),
            RuntimeError,
            f"{type(module).__name__} has no parameter that requires a gradient, so there is "
            "nothing to reduce.\nUse the module as it is.",
        )
        lazy = [name for name, parameter in named.items() if is_lazy(parameter)]
        require(
            not lazy,
            RuntimeError,
            f"{type(module).__name__} has uninitialized parameters, which have no shape yet: "
            f"{_checks.some_of(lazy)}.\nRun one forward on a small input before wrapping the "
            "module.",
        )
        split = [name for name, parameter in named.items() if isinstance(parameter, DTensor)]
        require(
            not split,
            RuntimeError,
            f"{_checks.some_of(split[:1])} is a DTensor, split over a mesh of its own.\nGive the "
            "mesh's other dimension as device_mesh, such as mesh['data'].",
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
            f"the parameters of {type(self.module).__name__} must be on one type of device, they "
            f"are on {', '.join(types)}.\nMove the module to one of them.",
        )
        self.is_multi_device_module = len(devices) > 1
        self.device_ids = None
        self.output_device = None
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            require(
                not device_ids and not output_device,
                ValueError,
                "device_ids and output_device are for a module on one accelerator; this one is on "
                f"{', '.join(sorted(map(str, devices)))}, and device_ids={device_ids}, "
                f"output_device={output_device} were given.\nLeave them out.",
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
            _checks.bytes_of_cap("bucket_cap_mb_list", cap) for cap in bucket_cap_mb_list or []
        ]
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not self.bucket_bytes_cap_list
        cap = _DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        self.bucket_bytes_cap = _checks.bytes_of_cap("bucket_cap_mb", cap)
        if self.bucket_bytes_cap_list:
            self.bucket_bytes_cap = max(self.bucket_bytes_cap_list)
        self.broadcast_bucket_size = _BROADCAST_BYTES
        if hasattr(torch_ddp, "_BucketCapacityConfig"):  # an attribute of torch's wrapper
            self._bucket_config = torch_ddp._BucketCapacityConfig.create(
                bucket_cap_mb, bucket_cap_mb_list, self._use_python_reducer
            )

    def _set_up_state(self) -> None:
        """Attributes that the inherited methods use."""
        self._use_python_reducer = _compiling.reduces_in_compiled_backward()
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
        state = hooks._AllreduceUpcastHookState(
            ddp_weakref=weakref.ref(self), upcast_stream=torch.Stream()
        )
        self.register_comm_hook(state, hooks._reducer_allreduce_and_upcast_hook)
        self.reducer._set_mixed_precision_param_dtype(precision.param_dtype)

    def _ddp_init_helper(
        self,
        parameters: list[torch.Tensor],
        expect_sparse: list[bool],
        names: dict[int, str],
        static_graph: bool,
        compare_ranks: bool = False,
    ) -> None:
        """Makes reducer and logger, without communication unless ranks are compared.

        torch's methods call it for a copy, and where one rank alone may read a pickled wrapper.
        """
        _compiling.leave_to_interpreter()
        if self._use_python_reducer:
            # The compiler looks into torch's methods.
            for name in _TRACED:
                setattr(self, name, getattr(super(), name))
        if self.mixed_precision is not None:
            for index, parameter in enumerate(parameters):
                parameter._idx = index
        rebuilds = static_graph or not self.find_unused_parameters
        if self._given_plan is None:
            caps = self._bucket_caps()
            if not self.bucket_bytes_cap_list and rebuilds:
                # One bucket per dtype until buckets are rebuilt: before that, other collectives
                # of the module's own might come between those of buckets.
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
        # Torch takes the parameters that it splits over ranks out around each forward.
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
        """In bytes."""
        if self.bucket_bytes_cap_list:
            return self.bucket_bytes_cap_list
        if self.bucket_bytes_cap_default:
            return [dist._DEFAULT_FIRST_BUCKET_BYTES, self.bucket_bytes_cap]
        return [self.bucket_bytes_cap]

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_watch", *_TRACED):  # made anew with the reducer
            state.pop(name, None)
        if not hasattr(_TorchDistributedDataParallel, "broadcast_buffers"):
            # Where it is read without brigade, a torch before 2.13 asks for this.
            state["broadcast_buffers"] = self.forward_sync_buffers
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "broadcast_buffers" in state:
            state.setdefault("forward_sync_buffers", state.pop("broadcast_buffers"))
        super().__setstate__(state)

    # ---------------------------------------------------------------- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; a backward through its outputs is reduced.

        Collective unless under no_sync(): every rank calls it equally often. Under
        no_grad() it makes buffers equal, if there are any, but not inside join():
        evaluate on one rank with `module`. Under no_grad() it also awaits the ends of
        the iterations so far (max_unconfirmed_iterations).
        """
        with _profiler_range("DistributedDataParallel.forward"):
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
        """Ranks that have joined would not know that nothing is to be reduced."""
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
                f"DistributedDataParallel: the model was wrapped in process {self._process}; this "
                f"is a fork of it, {os.getpid()}, in which the process group has no threads.\n"
                "Use the wrapped module itself, or start a process with a group of its own."
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
                    output = _tied(output, copies=self._ddp_sink_clone)
                with self._logging_errors():
                    self.reducer.prepare_for_backward(list(torch_ddp._find_tensors(output)))
            elif torch.is_grad_enabled():
                self.reducer._note_local_forward(list(torch_ddp._find_tensors(output)))
        self._clear_grad_buffer()
        return output

    def _sync_buffers(self) -> None:
        if self._lets_reducer_broadcast() and self._broadcast_buffers():
            return
        # A rank that failed unnoticed must not take a peer's bucket for a buffer.
        self.reducer._meet_peers()
        super()._sync_buffers()

    def _lets_reducer_broadcast(self) -> bool:
        """Not where the source may be another rank than 0, or a hook of the user's broadcasts."""
        return (
            torch.is_grad_enabled()
            and not self._join_config.enable
            and not hasattr(self, "buffer_hook")
        )

    def _broadcast_buffers(self) -> bool:
        self._assign_modules_buffers()
        buffers = tuple(self.modules_buffers)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffers):
            return bool(buffers) and self.reducer._send_buffers(buffers)

    def _default_broadcast_coalesced(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._default_broadcast_coalesced(*args, **kwargs)
        except RuntimeError as error:
            if not self._delay_all_reduce_all_params:
                self.reducer._abort_group()
            raise dist.DistBackendError(
                "DistributedDataParallel: broadcasting buffers on rank "
                f"{self.process_group.rank()} failed; a peer has died, left or not answered: "
                f"{error}\nSave what is needed and make a new process group."
            ) from error

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state, once all ranks are known to have ended their iterations.

        On devices gradients are delivered before that (max_unconfirmed_iterations).

        Raises:
            DistBackendError: A rank has failed in one of them: parameters are not to be saved.
        """
        self._await_statuses()
        return super().state_dict(*args, **kwargs)

    def _await_statuses(self) -> None:
        if not self._delay_all_reduce_all_params:
            self.reducer._await_statuses()

    def can_continue(self) -> bool:
        """Whether the process group can be used after an error.

        False once its connections are closed: after a peer has died, left or not answered, where
        zeros can't stand in for a failed rank's gradients (docs/recovery.md), and on devices
        after any failure. Then a new group is needed, and a new wrapper on it; the module stays
        usable.
        """
        return self._delay_all_reduce_all_params or self.reducer.can_continue()

    def bucket_plan(self) -> list[list[int]]:
        """Indices of parameters by bucket, in launch order.

        Changes once, when buckets are rebuilt. Given back as the argument of that name, it
        makes a resumed training's sums bit-equal.
        """
        return self.reducer._bucket_plan()

    def sync_buffers(self, src: int = 0) -> None:
        """Gives every rank the buffers of one; those of the last forward are each rank's own.

        Collective. For before a rank saves or evaluates the model, and after join().

        Args:
            src: The rank within the group whose buffers are taken.
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
        """Called by a rank that has joined, in place of _sync_buffers() of ranks with data."""
        if self._check_sync_bufs_pre_fwd():
            self.reducer._meet_peers()
        super()._check_and_sync_module_buffers()

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer._shadow_iteration(self._divide_by_initial_world_size)

    def _match_unused_params_allreduce(self) -> None:
        """Nothing: _shadow_iteration() has done it."""

    # ------------------------------------------------------------------ hooks

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        """As torch's, but backward does not end before the result is there."""
        self._delay_grad_buffer.div_(self.process_group.size())
        work = dist.all_reduce(self._delay_grad_buffer, group=self.process_group, async_op=True)
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)
        return grad

    def _setup_in_backward_optimizers(self) -> None:
        """Optimizers of torch's _apply_optimizer_in_backward() step after any comm hook.

        torch's wrapper steps them after its own all-reduce alone, and on accelerators alone.
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
        """Lets `hook` carry buckets across ranks, once for all.

        Collective: on every rank at the same place, with a hook of one name.

        Args:
            state: Handed to the hook at each call.
            hook: Takes `state` and a torch.distributed.GradBucket of raw
                gradients, returns a Future of the tensor that replaces them.

        Raises:
            TypeError: `hook` is not callable.
            ValueError: `hook` is annotated with other types.
            DistBackendError: A peer failed.
            RuntimeError: There is a hook already, or ranks give other hooks.
        """
        with self._logging_errors():
            _checks.require_comm_hook(hook)
            self.reducer._register_comm_hook(state, hook)
        self.logger._set_comm_hook_name(_checks.name_of(hook))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
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
                self.logger.set_error_and_log(f"{type(error).__name__}: {error}")
            raise
