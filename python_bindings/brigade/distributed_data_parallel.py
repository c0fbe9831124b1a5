"""DistributedDataParallel: one copy of a module per rank, gradients averaged in backward.

The class takes the place of torch's: same parameters, same methods, and an
instance of it, since frameworks and the compiler ask. Gradients are the business
of brigade's reducer; what has nothing to do with them (buffers, join, no_sync,
mixed precision's casts) is inherited.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _get_device_index
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import distributed as torch_ddp

from brigade import _checks, _optimizer_in_backward
from brigade._C import Logger, Reducer, describe_tensor, require_agreement, tie_outputs
from brigade._parameter_watch import ParameterWatch

_MIB = 1024 * 1024
_DEFAULT_BUCKET_CAP_MB = 25
_BROADCAST_BYTES = 250 * _MIB

# What install() may have put in its place is not torch's.
_TorchDistributedDataParallel = torch_ddp.DistributedDataParallel


def _descriptions(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    return [
        describe_tensor(name, tensor) + (", requires_grad" if tensor.requires_grad else "")
        for name, tensor in tensors
    ]


class DistributedDataParallel(_TorchDistributedDataParallel):
    """Data-parallel training of a module over the ranks of a process group.

    Collective: every rank wraps the same module. Afterwards all hold rank 0's
    parameters and buffers, and each backward leaves the average over all ranks
    in ``.grad``. On the CPU, and without a comm hook of the user's, a large
    gradient may have its bucket's storage in place of one of its own; clone one
    to save or resize it alone.

    Args:
        module: Has at least one parameter that requires a gradient.
        device_ids: The one accelerator that the module is on, or None.
        output_device: The same device, or None.
        dim: Kept for torch's scatter() and gather().
        broadcast_buffers: Rank 0's buffers are broadcast before each forward
            that will be reduced.
        init_sync: Ranks are compared and given rank 0's tensors now.
        process_group: Default: the default group.
        bucket_cap_mb: Size of a bucket in MiB; default: 1 for the first, then 25.
        find_unused_parameters: Parameters that an output does not depend on get
            no gradient instead of raising an error.
        check_reduction: Without effect.
        gradient_as_bucket_view: Gradients are views of their buckets, which saves
            a copy and the memory of the gradients.
        static_graph: Every iteration uses the same parameters in the same way.
        delay_all_reduce_named_params: Pairs of names and parameters that are
            reduced together when the gradient of `param_to_hook_all_reduce` is
            there.
        param_to_hook_all_reduce: See above.
        mixed_precision: Dtypes of parameters, reduction and buffers.
        device_mesh: A 1-D mesh instead of a process group.
        skip_all_reduce_unused_params: Buckets that no rank uses are not reduced.
        bucket_cap_mb_list: Sizes of the first, second, ... bucket in MiB; the
            last one repeats.

    Raises:
        RuntimeError: Nothing to train, lazy parameters, or ranks differ.
        TypeError: Arguments of a wrong type.
        ValueError: Arguments that contradict each other or the module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
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
    ) -> None:
        # torch's own constructor would make a reducer of torch's.
        torch.nn.Module.__init__(self)
        Joinable.__init__(self)
        _checks.require_module(module)
        _checks.require_precision_fits(mixed_precision, find_unused_parameters)
        self._set_up_group(module, process_group, device_mesh)
        _checks.require_type(Iterable, delay_all_reduce_named_params=delay_all_reduce_named_params)
        delayed = list(delay_all_reduce_named_params or [])
        _checks.require_both_or_none(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
        )
        _checks.require_named_parameters(delayed)
        self._set_up_parameters(module, delayed)
        self._set_up_devices(device_ids, output_device)
        self._set_up_buckets(bucket_cap_mb, bucket_cap_mb_list)
        self._set_up_state()
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.mixed_precision = mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        if check_reduction:
            warnings.warn(
                "DistributedDataParallel: check_reduction has no effect; leave it out.",
                FutureWarning,
                stacklevel=2,
            )
        if delayed:
            self._register_delay_all_reduce_hook(
                bucket_cap_mb=self.bucket_bytes_cap // _MIB,
                param_to_hook_all_reduce=param_to_hook_all_reduce,
                device_ids=self.device_ids,
            )
            if self._delay_all_reduce_all_params:
                return

        if init_sync and self.process_group.size() > 1:
            self._require_same_module(static_graph)
        parameters, expect_sparse_gradients = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(
            parameters, expect_sparse_gradients, names, static_graph, compare_ranks=init_sync
        )
        if init_sync:
            _sync_module_states(
                module=self.module,
                process_group=self.process_group,
                broadcast_bucket_size=self.broadcast_bucket_size,
                src=0,
                params_and_buffers_to_ignore=self.parameters_to_ignore,
                broadcast_buffers=self.broadcast_buffers,
            )
        if mixed_precision is not None:
            self._set_up_mixed_precision(mixed_precision)
        if static_graph:
            self._set_static_graph()
        if self._use_python_reducer:
            self._set_up_compiled_autograd()

    # ------------------------------------------------------------------ setup

    def _require_same_module(self, static_graph: bool) -> None:
        """Compares with the other ranks what decides on collectives, frozen parameters too."""
        options = [
            f"broadcast_buffers = {self.broadcast_buffers}",
            f"find_unused_parameters = {self.find_unused_parameters}",
            f"skip_all_reduce_unused_params = {self.skip_all_reduce_unused_params}",
            f"static_graph = {static_graph}",
            f"mixed_precision = {self.mixed_precision}",
            f"delayed parameters = {len(self._delay_all_reduce_params)}",
        ]
        require_agreement(self.process_group, "option", options)
        parameters = self._not_ignored(self.module.named_parameters())
        require_agreement(self.process_group, "parameter", _descriptions(parameters))
        if self.broadcast_buffers:
            buffers = self._not_ignored(self.module.named_buffers())
            require_agreement(self.process_group, "buffer", _descriptions(buffers))

    def _not_ignored(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> list[tuple[str, torch.Tensor]]:
        return [entry for entry in tensors if entry[0] not in self.parameters_to_ignore]

    def _set_up_group(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None,
        device_mesh: dist.DeviceMesh | None,
    ) -> None:
        self.logger = None
        self.process_group = _checks.process_group_of(process_group, device_mesh)
        if device_mesh is None:
            return
        self.device_mesh = device_mesh
        if device_mesh._get_root_mesh() != device_mesh:
            # The other dimensions are tensor parallelism's.
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(module)

    def _set_up_parameters(
        self, module: torch.nn.Module, delayed: list[tuple[str, torch.nn.Parameter]]
    ) -> None:
        self.module = module
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore.update(name for name, _ in delayed)
        self._delay_all_reduce_params = [parameter for _, parameter in delayed]
        named = self._not_ignored(module.named_parameters())
        self._module_parameters = [parameter for _, parameter in named]
        if not delayed:
            _checks.require_trainable(module, self._module_parameters)
        _checks.require_initialized(module, named)

    def _set_up_devices(self, device_ids: Sequence[Any] | None, output_device: Any) -> None:
        parameters = self._module_parameters or self._delay_all_reduce_params
        self.device = parameters[0].device
        self.device_type = _checks.device_type_of(self.module, parameters)
        self.is_multi_device_module = any(p.device != self.device for p in parameters)
        self.device_ids = None
        self.output_device = None
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            _checks.require_no_device_ids(device_ids, output_device, parameters)
            return
        _checks.require_one_device_id(device_ids)
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

    def _set_up_state(self) -> None:
        """What the inherited methods keep between calls."""
        self._use_python_reducer = torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer"
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

    def _set_up_compiled_autograd(self) -> None:
        """The compiler reduces gradients itself; it wants to see torch's file and hooks."""
        torch._inductor.config._fuse_ddp_communication = True
        torch._inductor.config._fuse_ddp_bucket_size = self.bucket_bytes_cap // _MIB
        rules = torch._dynamo.trace_rules
        rules.LEGACY_MOD_INLINELIST.update({"torch.nn.parallel.distributed", __name__})
        rules.get_legacy_mod_inlinelist.cache_clear()
        self.forward = super().forward  # which the compiler looks into
        self._register_accum_grad_hook()

    def _ddp_init_helper(
        self,
        parameters: list[torch.Tensor],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
        compare_ranks: bool = True,
    ) -> None:
        """Makes reducer and logger; also called when a pickled module is read."""
        if self.mixed_precision is not None:
            for index, parameter in enumerate(parameters):
                parameter._idx = index
        # The last layers' gradients come first.
        buckets, limits = dist._compute_bucket_assignment_by_size(
            parameters, self._first_bucket_caps(static_graph), expect_sparse_gradient
        )
        names = {i: name.lstrip(".") for i, name in param_to_name_mapping.items()}
        self.reducer = Reducer(
            parameters,
            buckets[::-1],
            limits[::-1],
            self.process_group,
            expect_sparse_gradient,
            self.bucket_bytes_cap,
            self.find_unused_parameters,
            self.gradient_as_bucket_view,
            names,
            dist._DEFAULT_FIRST_BUCKET_BYTES
            if self.bucket_bytes_cap_default
            else self.bucket_bytes_cap,
            self.skip_all_reduce_unused_params,
            self._use_python_reducer,
            self.bucket_bytes_cap_list,
            static_graph=static_graph,
            verify_across_ranks=compare_ranks,
        )
        self.logger = Logger(self.reducer)
        self.reducer.set_logger(self.logger)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            any(isinstance(m, torch.nn.SyncBatchNorm) for m in self.module.modules()),
            static_graph,
        )
        self._passing_sync_batchnorm_handle(self.module)
        self._process = os.getpid()
        self._watch = ParameterWatch(
            self.module,
            {names.get(i, str(i)): parameter for i, parameter in enumerate(parameters)},
            others=self._module_parameters,
            ignored=self.parameters_to_ignore,
        )

    def _first_bucket_caps(self, static_graph: bool) -> list[int]:
        """Caps in bytes until buckets are rebuilt from the order that was seen.

        One bucket per dtype where they will be rebuilt: before that, other
        collectives of the module's own might come between those of buckets.
        """
        if self.bucket_bytes_cap_list:
            return self.bucket_bytes_cap_list
        if static_graph or not self.find_unused_parameters:
            return [sys.maxsize]
        if self.bucket_bytes_cap_default:
            return [dist._DEFAULT_FIRST_BUCKET_BYTES, self.bucket_bytes_cap]
        return [self.bucket_bytes_cap]

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_watch", None)  # made anew with the reducer
        return state

    # ---------------------------------------------------------------- forward

    # Left to the interpreter by the compiler, as torch's; it compiles the module.
    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; a backward through what it returns is reduced."""
        # Profilers see the same range as torch's class has, but its record_function
        # makes each operation inside of it slower while nobody profiles.
        with torch._C._profiler._RecordFunctionFast("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            if self._delay_all_reduce_all_params:
                outputs = self.module.forward(*inputs, **kwargs)
            else:
                outputs = self._run_ddp_forward(*inputs, **kwargs)
            return self._post_forward(outputs)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._check_parameters()
        return super()._pre_forward(*inputs, **kwargs)

    @torch._disable_dynamo(recursive=False)
    def _check_parameters(self) -> None:
        if self._use_python_reducer or self._delay_all_reduce_all_params:
            return
        with self._errors_in_logging_data():
            _checks.require_process(self._process)
            self._watch.check()

    @contextmanager
    @torch._disable_dynamo(recursive=False)
    def _inside_ddp_forward(self):
        # The compiler asks torch's class, whatever install() put in its place.
        _TorchDistributedDataParallel._active_ddp_module = self
        try:
            yield
        finally:
            _TorchDistributedDataParallel._active_ddp_module = None

    @torch._disable_dynamo(recursive=False)
    def _post_forward(self, output: Any) -> Any:
        if self._use_python_reducer:
            return output
        if not self._delay_all_reduce_all_params:
            if self._check_sync_bufs_post_fwd():
                self._sync_buffers()
            will_reduce = torch.is_grad_enabled() and self.require_backward_grad_sync
            self.require_forward_param_sync = will_reduce
            if will_reduce:
                if self.find_unused_parameters and not self.static_graph:
                    output = self._tie_outputs(output)
                self.reducer.prepare_for_backward(list(torch_ddp._find_tensors(output)))
            elif torch.is_grad_enabled():
                self.reducer._cancel_preparation()
        self._clear_grad_buffer()
        return output

    def _sync_buffers(self) -> None:
        # A rank that failed unnoticed must not take a peer's bucket for a buffer.
        self.reducer._meet_peers()
        super()._sync_buffers()

    def _tie_outputs(self, output: Any) -> Any:
        """Lets the loss leave some of the outputs out."""
        leaves, structure, is_rref = torch_ddp._tree_flatten_with_rref(output)
        tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
        if sum(tensor.grad_fn is not None for tensor in tensors) < 2:
            return output
        tied = iter(tie_outputs(tensors, copies=self._ddp_sink_clone))
        leaves = [next(tied) if torch.is_tensor(leaf) else leaf for leaf in leaves]
        return torch_ddp._tree_unflatten_with_rref(leaves, structure, is_rref)

    # ------------------------------------------------------------------- join

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer._shadow_iteration()

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
        stepped = [p for p in self._module_parameters if _optimizer_in_backward.has_optimizer(p)]
        if not stepped:
            return
        for parameter in stepped:
            _optimizer_in_backward.take_over(parameter)
        if not self._comm_hooks:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            self.register_comm_hook(self.process_group, allreduce_hook)
        hook, state = self._comm_hooks[0]
        hook = _optimizer_in_backward.stepping_hook(hook, stepped)
        self.reducer._register_comm_hook(state, hook, replaces=True)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Lets `hook` carry buckets across ranks, once for all.

        Args:
            state: Handed to the hook at each call.
            hook: Takes `state` and a torch.distributed.GradBucket of raw
                gradients, returns a Future of the tensor that replaces them.

        Raises:
            TypeError: `hook` is not callable.
            ValueError: `hook` is annotated with other types.
            RuntimeError: There is a hook already.
        """
        with self._errors_in_logging_data():
            _checks.require_comm_hook(hook)
            self.reducer._register_comm_hook(state, hook)
        self.logger._set_comm_hook_name(_checks.name_of(hook))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        with self._errors_in_logging_data():
            self.reducer._register_builtin_comm_hook(comm_hook_type)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    @contextmanager
    def _errors_in_logging_data(self):
        try:
            yield
        except Exception as error:
            self.logger.set_error_and_log(f"{type(error).__name__}: {error}")
            raise
