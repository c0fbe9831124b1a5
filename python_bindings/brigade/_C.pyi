from __future__ import annotations
import collections.abc
import datetime
import torch
import torch._C._distributed_c10d
import torch.distributed.distributed_c10d
import typing
__all__: list[str] = ['CheckpointModel', 'FullyShardOptions', 'GatherTimes', 'Logger', 'OptimizerState', 'Reducer', 'ReductionTimes', 'ShardedModel', 'ShardedUnit', 'ShardingTimeline', 'UnitSettings', 'check_parameters', 'describe_tensor', 'entries_of', 'fail_checkpoint', 'gather_whole', 'has_entries', 'is_sharded', 'load_checkpoint', 'local_of', 'offset_of', 'place_of', 'ranks_of_a_host', 'rebuilds_by_default', 'recording_group', 'require_agreement', 'save_checkpoint', 'set_piece', 'shard_like', 'suggest_control_device', 'sweep', 'then_collective', 'tie_outputs', 'version']
class Reducer:
    """
    Averages gradients over a process group while backward runs; stands in for torch.distributed.Reducer.
    """
    @typing.overload
    def __init__(self, params: collections.abc.Sequence[torch.Tensor], bucket_indices: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt]], per_bucket_size_limits: collections.abc.Sequence[typing.SupportsInt], process_group: torch.distributed.distributed_c10d.ProcessGroup, expect_sparse_gradients: collections.abc.Sequence[bool] = [], bucket_bytes_cap: typing.SupportsInt = 26214400, find_unused_parameters: bool = False, gradient_as_bucket_view: bool = False, param_to_name_mapping: collections.abc.Mapping[typing.SupportsInt, str] = {}, first_bucket_bytes_cap: typing.SupportsInt = 1048576, skip_all_reduce_unused_params: bool = False, use_python_reducer: bool = False, bucket_bytes_cap_list: collections.abc.Sequence[typing.SupportsInt] = [], batched_grad_copy: bool = False, lazy_bucket_allocation: bool = False, *, rebuild_buckets: bool | None = None, static_graph: bool = False, verify_across_ranks: bool = True, one_backward_per_forward: bool = False) -> None:
        ...
    @typing.overload
    def __init__(self, parameters: collections.abc.Sequence[torch.Tensor], process_group: torch.distributed.distributed_c10d.ProcessGroup, *, names: collections.abc.Mapping[typing.SupportsInt, str], expect_sparse: collections.abc.Sequence[bool], first_bucket_caps_bytes: collections.abc.Sequence[typing.SupportsInt], bucket_caps_bytes: collections.abc.Sequence[typing.SupportsInt], bucket_plan: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt]] | None = None, find_unused_parameters: bool = False, skip_all_reduce_unused_parameters: bool = False, static_graph: bool = False, gradient_as_bucket_view: bool = False, lazy_bucket_allocation: bool = False, verify_across_ranks: bool = True, one_backward_per_forward: bool = False, max_unconfirmed_iterations: typing.SupportsInt = 1, reproducible: bool = False, reproducible_row_size: typing.SupportsInt | None = None, reduces_by_itself: bool = True) -> None:
        """
        The first buckets are of the first caps, in the order of parameters, and launched from the last one on; those that are rebuilt are of the other caps. A bucket_plan takes the place of both.
        """
    def _abort_group(self) -> None:
        ...
    def _autograd_hook(self, index: typing.SupportsInt) -> None:
        ...
    def _await_statuses(self) -> None:
        ...
    def _bucket_plan(self) -> list[list[int]]:
        """
        Indices of parameters by bucket, in launch order.
        """
    def _check_reducer_finalized(self) -> None:
        ...
    def _ddp_graph_static(self) -> bool:
        ...
    def _delay_all_reduce(self) -> None:
        """
        Nothing to do: the reducer sees the end of backward itself.
        """
    def _finalize_backward_manual(self) -> None:
        ...
    def _get_local_used_map(self) -> torch.Tensor:
        ...
    def _get_zeros_like_grad_buckets(self, *args) -> None:
        ...
    def _install_post_backward_futures(self, futures: collections.abc.Sequence[torch.Future]) -> None:
        ...
    def _meet_peers(self) -> None:
        ...
    def _note_local_forward(self, outputs: collections.abc.Sequence[torch.Tensor]) -> None:
        ...
    def _push_all_rebuilt_params(self) -> None:
        """
        Nothing: _shadow_iteration() has done it.
        """
    def _rebuild_buckets(self) -> bool:
        ...
    def _register_builtin_comm_hook(self, comm_hook_type: torch._C._distributed_c10d.BuiltinCommHookType) -> None:
        ...
    def _register_comm_hook(self, state: typing.Any, comm_hook: typing.Any) -> None:
        ...
    def _remove_autograd_hooks(self) -> None:
        ...
    def _reset_state(self) -> None:
        ...
    def _run_allreduce_hook(self, bucket: torch._C._distributed_c10d.GradBucket) -> torch.Future:
        ...
    def _run_comm_hook(self, *args) -> None:
        ...
    def _send_buffers(self, buffers: collections.abc.Sequence[torch.Tensor]) -> bool:
        ...
    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: typing.SupportsInt) -> None:
        ...
    def _set_forward_pass_work_handle(self, work: torch.distributed.distributed_c10d.Work, use_static_world_size: bool) -> None:
        ...
    def _set_manual_finalization_required(self, required: bool) -> None:
        ...
    def _set_mixed_precision_param_dtype(self, data_type: torch.dtype | None) -> None:
        ...
    def _set_optimizer_in_backward(self) -> None:
        """
        Nothing to do: _step_in_backward() has done it.
        """
    def _set_sparse_metadata(self, *args) -> None:
        ...
    def _set_static_graph(self) -> None:
        ...
    def _shadow_iteration(self, use_world_size: bool = True) -> None:
        ...
    def _should_finalize_after_backward(self) -> bool:
        ...
    def _step_in_backward(self, parameters: collections.abc.Sequence[torch.Tensor], step: typing.Any) -> None:
        """
        Calls step(parameter) as soon as the parameter's bucket has arrived, behind any comm hook, on whichever thread that is.
        """
    def _update_process_group(self, new_process_group: torch.distributed.distributed_c10d.ProcessGroup) -> None:
        ...
    def can_continue(self) -> bool:
        """
        False once the group's connections are closed (docs/recovery.md): a new group is needed then.
        """
    def describe_timeline(self) -> str:
        """
        A table of the last sampled iteration: one line per bucket, in ms from the begin of backward.
        """
    def get_backward_stats(self) -> list[int]:
        """
        By parameter: ns from the begin of the last sampled backward to its gradient.
        """
    def parameter_names(self) -> list[str]:
        """
        By parameter, or empty.
        """
    @typing.overload
    def prepare_for_backward(self, outputs: collections.abc.Sequence[torch.Tensor]) -> None:
        ...
    @typing.overload
    def prepare_for_backward(self, output: torch.Tensor) -> None:
        ...
    def prepare_for_forward(self) -> None:
        ...
    def set_logger(self, logger: typing.Any) -> None:
        """
        Nothing to do: the logger asks the reducer.
        """
    def set_stall_report_after(self, time: datetime.timedelta) -> None:
        """
        A rank that has waited so long for its peers warns and names the late ones. At first half of the group's timeout, 60 s at most; timedelta(0): never. Raises ValueError if it is negative.
        """
class Logger(torch._C._distributed_c10d.Logger):
    """
    Logging data of a brigade.Reducer; stands in for torch.distributed.Logger.
    """
    def __init__(self, reducer: Reducer) -> None:
        ...
    def _get_ddp_logging_data(self) -> torch._C._distributed_c10d.DDPLoggingData:
        ...
    def _set_comm_hook_name(self, comm_hook: str) -> None:
        ...
    def _set_static_graph(self) -> None:
        ...
    def _set_uneven_input_join(self) -> None:
        ...
    def set_construction_data_and_log(self, module_name: str, device_ids: collections.abc.Sequence[typing.SupportsInt], output_device: typing.SupportsInt, broadcast_buffers: bool, has_sync_bn: bool, static_graph: bool) -> None:
        ...
    def set_error_and_log(self, error: str) -> None:
        ...
    def set_runtime_stats_and_log(self) -> None:
        ...
class FullyShardOptions:
    """
    See fsdp/fully_shard_options.h.
    """
    broadcast_parameters: bool
    def __init__(self, *, num_shards: typing.SupportsInt | None, reshard_to: typing.SupportsInt | None, prefetch_depth: typing.SupportsInt, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, broadcast_parameters: bool, wire_dtype: torch.dtype | None, reproducible: bool) -> None:
        """
        `wire_dtype`: of a comm hook that compresses gradients.
        """
class UnitSettings:
    """
    See fsdp/sharded_unit.h.
    """
    gathers_in_backward: bool
    keeps_storage: bool
    reshards_after_backward: bool
    reshards_after_forward: bool
    sums_over_replicas: bool
    synchronizes: bool
    @property
    def backward_prefetch_depth(self) -> int | None:
        ...
    @backward_prefetch_depth.setter
    def backward_prefetch_depth(self, arg0: typing.SupportsInt | None) -> None:
        ...
    @property
    def forward_prefetch_depth(self) -> int | None:
        ...
    @forward_prefetch_depth.setter
    def forward_prefetch_depth(self, arg0: typing.SupportsInt | None) -> None:
        ...
    @property
    def gradient_divisor(self) -> float | None:
        ...
    @gradient_divisor.setter
    def gradient_divisor(self, arg0: typing.SupportsFloat | None) -> None:
        ...
    @property
    def reshards_to(self) -> int | None:
        ...
    @reshards_to.setter
    def reshards_to(self, arg0: typing.SupportsInt | None) -> None:
        ...
class ShardedUnit:
    """
    Sharded parameters that no ShardedModel has taken over yet.
    """
    @staticmethod
    def register_compression(units: collections.abc.Sequence[ShardedUnit], wire_dtype: torch.dtype, group: torch.distributed.distributed_c10d.ProcessGroup) -> None:
        """
        Collective. Sets a comm hook that compresses.
        """
    def __init__(self, name: str, names: collections.abc.Sequence[str], parameters: collections.abc.Sequence[torch.Tensor], group: torch.distributed.distributed_c10d.ProcessGroup, options: FullyShardOptions, reshard_after_forward: bool, spans_segments: bool, block_numels: collections.abc.Sequence[typing.SupportsInt] | None, dtypes: collections.abc.Sequence[torch.dtype | None] | None) -> None:
        """
        Collective; shards the parameters in place. By parameter: `block_numels`, elements that are never cut; `dtypes`, in forward and backward.
        """
    def rename(self, name: str, names: collections.abc.Sequence[str]) -> None:
        """
        For errors: the paths in the outermost module.
        """
    @property
    def settings(self) -> UnitSettings:
        """
        None once there is a model.
        """
class GatherTimes:
    """
    ns of the steady clock; 0: did not happen.
    """
    @property
    def complete_ns(self) -> int:
        ...
    @property
    def exposed_ns(self) -> int:
        """
        What forward or backward waited for.
        """
    @property
    def is_in_forward(self) -> bool:
        ...
    @property
    def launch_ns(self) -> int:
        ...
    @property
    def needed_ns(self) -> int:
        ...
    @property
    def unit(self) -> str:
        ...
    @property
    def whole_ns(self) -> int:
        ...
class ReductionTimes:
    """
    ns of the steady clock; 0: did not happen.
    """
    @property
    def complete_ns(self) -> int:
        ...
    @property
    def launch_ns(self) -> int:
        ...
    @property
    def unit(self) -> str:
        ...
class ShardingTimeline:
    """
    See fsdp/sharding_timeline.h; str() is a table.
    """
    def __str__(self) -> str:
        ...
    def exposed_ns(self, reduction: typing.SupportsInt) -> int:
        """
        Of that one, what came behind backward and no earlier one covers.
        """
    @property
    def backward_begin_ns(self) -> int:
        ...
    @property
    def backward_end_ns(self) -> int:
        ...
    @property
    def finalize_end_ns(self) -> int:
        ...
    @property
    def forward_begin_ns(self) -> int:
        ...
    @property
    def forward_end_ns(self) -> int:
        ...
    @property
    def gathers(self) -> list[GatherTimes]:
        """
        In launch order.
        """
    @property
    def iteration(self) -> int:
        """
        0: none has been sampled.
        """
    @property
    def reductions(self) -> list[ReductionTimes]:
        """
        In launch order.
        """
class ShardedModel:
    """
    See fsdp/sharded_model.h.
    """
    def __init__(self, units: collections.abc.Sequence[ShardedUnit], group: torch.distributed.distributed_c10d.ProcessGroup, options: FullyShardOptions, places: collections.abc.Sequence[tuple[typing.SupportsInt | None, tuple[collections.abc.Sequence[typing.SupportsInt], typing.SupportsInt, str] | None]]) -> None:
        """
        Collective. Takes the units over. `places`: by unit, the index of the unit around it, and its mesh: the ranks in the group, the number of shards and the name that these ranks have in common.
        """
    def begin_forward(self) -> None:
        ...
    def can_continue(self) -> bool:
        ...
    def clip_grad_norm(self, max_norm: typing.SupportsFloat, norm_type: typing.SupportsFloat = 2.0) -> float:
        ...
    def end_forward(self, outputs: collections.abc.Sequence[torch.Tensor]) -> None:
        ...
    def explain(self) -> str:
        ...
    def forward_failed(self, message: str) -> None:
        ...
    def gradient_slot(self, parameter: torch.Tensor) -> torch.Tensor:
        ...
    def holds_gradients(self) -> bool:
        ...
    def is_first_replica(self, unit: typing.SupportsInt) -> bool:
        ...
    def meet_peers(self) -> None:
        """
        Collective.
        """
    def num_ranks_with(self, has_data: bool) -> int:
        """
        Collective.
        """
    def reduce(self) -> None:
        """
        Collective: what backwards without synchronisation have accumulated.
        """
    def reshard(self, units: collections.abc.Sequence[typing.SupportsInt], drops_writes: bool = False) -> None:
        ...
    def set_max_reducing(self, value: typing.SupportsInt) -> None:
        ...
    def set_stall_report_after(self, time: datetime.timedelta) -> None:
        ...
    def set_synchronizes(self, value: bool) -> None:
        ...
    def set_timeline_sample_rate(self, sample_rate: typing.SupportsInt) -> None:
        ...
    def settings(self, unit: typing.SupportsInt) -> UnitSettings:
        ...
    def statistics(self) -> dict:
        ...
    def step_without_data(self) -> None:
        ...
    def timeline(self) -> ShardingTimeline:
        ...
    def unshard(self, units: collections.abc.Sequence[typing.SupportsInt], may_write: bool = False) -> None:
        ...
    def use_in_backward(self, unit: typing.SupportsInt) -> None:
        ...
    @property
    def is_in_forward(self) -> bool:
        ...
class OptimizerState:
    """
    See checkpoint/optimizer_state.h.
    """
    def __init__(self, *, type: str, needs_tensors: bool, options: collections.abc.Sequence[str], parameters: collections.abc.Sequence[tuple[torch.Tensor, typing.SupportsInt, collections.abc.Sequence[str], collections.abc.Mapping[str, torch.Tensor]]]) -> None:
        """
        `options`: JSON by group. `parameters`: each with its group, the names of its fields and the current values.
        """
    @property
    def options(self) -> list[str]:
        ...
    @property
    def values(self) -> list[dict[str, torch.Tensor]]:
        """
        By parameter.
        """
class CheckpointModel:
    """
    See checkpoint/checkpoint.h.
    """
    @typing.overload
    def __init__(self, model: ShardedModel) -> None:
        """
        Collective.
        """
    @typing.overload
    def __init__(self, parameters: collections.abc.Sequence[tuple[str, torch.Tensor]], buffers: collections.abc.Sequence[tuple[str, torch.Tensor]], group: torch.distributed.distributed_c10d.ProcessGroup | None) -> None:
        """
        Unsharded on each rank of the group; None: of this process.
        """
def check_parameters(module_name: str, *, present: dict, reduced: list, names: collections.abc.Sequence[str], frozen: list, others: list, ignored: collections.abc.Sequence[str]) -> bool:
    """
    Raises RuntimeError if what is present is not what was wrapped: parameters that require gradients were added, replaced, removed or unfrozen. None in `reduced` stands for one that may change; `others` may be there. False: something stands in for parameters, so it will change again.
    """
def describe_tensor(name: str, tensor: torch.Tensor) -> str:
    """
    Name, dtype, sizes, strides and kind of device, as text.
    """
def entries_of(tables: list) -> list:
    """
    What is registered in tables of a module, one list for all.
    """
def fail_checkpoint(group: torch.distributed.distributed_c10d.ProcessGroup, failure: str) -> None:
    """
    Collective, in place of save_checkpoint() or load_checkpoint(): all ranks raise.
    """
def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """
    Collective: the whole tensor, plain.
    """
def has_entries(tables: list, entries: list) -> bool:
    """
    Whether entries_of() would give that list.
    """
def is_sharded(tensor: torch.Tensor) -> bool:
    ...
def load_checkpoint(model: CheckpointModel, path: str, optimizer: OptimizerState) -> tuple[dict[str, str], list[str]]:
    """
    Collective. Returns the metadata and warnings; fills `optimizer`, which may be None.
    """
def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """
    This rank's elements, 1D in memory order, to be read or written before the next forward.
    """
def offset_of(tensor: torch.Tensor) -> int:
    """
    Of the first local element in the whole.
    """
def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """
    Equal for aliases, also of no local elements; otherwise not, while both live.
    """
def ranks_of_a_host(group: torch.distributed.distributed_c10d.ProcessGroup) -> int:
    """
    Collective: how many ranks of the group are on each host.
    """
def rebuilds_by_default(*, static_graph: bool, find_unused_parameters: bool) -> bool:
    """
    Whether a reducer plans its buckets again from the order in which gradients became ready, if it was given no bucket_plan.
    """
def recording_group(world_size: typing.SupportsInt) -> torch.distributed.distributed_c10d.ProcessGroup:
    """
    A group of one process that answers at once, as if all ranks held what this one holds: for what a program costs beside its network. This rank is 0. Its log grows with each collective.
    """
def require_agreement(group: torch.distributed.distributed_c10d.ProcessGroup, what: str, items: collections.abc.Sequence[str], failure: str = '') -> None:
    """
    Collective. Raises RuntimeError on every rank alike, naming the first item in which ranks differ; `what` is the name of one item. If some ranks give a `failure`, what has gone wrong there, it says that instead.
    """
def save_checkpoint(model: CheckpointModel, in_shards: bool, path: str, metadata: collections.abc.Mapping[str, str], optimizer: OptimizerState) -> None:
    """
    Collective.
    """
def set_piece(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """
    `tensor` gets the piece, dtype and device of `other`.
    """
def shard_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """
    This rank's piece of `whole`, as `like` has it.
    """
def suggest_control_device(group: torch.distributed.distributed_c10d.ProcessGroup, device: torch.device) -> None:
    """
    Where a group of devices alone is to move what ranks tell each other, unless it is bound to one. The first call stands.
    """
def sweep(name: str, parameters: collections.abc.Sequence[torch.Tensor], loss: collections.abc.Callable[[], torch.Tensor], sizes: collections.abc.Sequence[str], group: torch.distributed.distributed_c10d.ProcessGroup, *, rounds: typing.SupportsInt, steps: typing.SupportsInt, find_unused_parameters: bool, static_graph: bool, gradient_as_bucket_view: bool, after_visit: collections.abc.Callable[[str], None]) -> tuple[str, str, bool]:
    """
    Collective; see bucket_sweep/sweep.h. Returns the table, all figures as JSON, and whether all sums were right.
    """
def then_collective(future: torch.Future, launch: typing.Any) -> torch.Future:
    """
    A second collective behind the first one of a comm hook.
    
    `launch` is called with the value of `future` when backward ends, in the order of the buckets on every rank, and returns the future of what it launched. A continuation (`future.then`) must not launch collectives: continuations run in another order on each rank.
    
    What `launch` raises comes out of backward, and ends the group's use: peers wait for the collective. Outside of a comm hook, waits for `future` and calls `launch` at once. Raises TypeError if `launch` returns no future.
    """
def tie_outputs(outputs: collections.abc.Sequence[torch.Tensor], copies: bool = True) -> list[torch.Tensor]:
    """
    Stand-ins for tensors: a backward from some of them goes through all, so that with find_unused_parameters the loss may leave outputs out (the wrapper's forward does it itself). copies=False: they share the outputs' memory, and must not be changed in place. One backward per forward.
    """
def version() -> str:
    """
    Of brigade, as CMakeLists.txt has it.
    """
