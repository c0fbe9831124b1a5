"""Patches of torch functions for sharded tensors, applied by the first fully_shard().

install() replaces torch's classes separately (_install.py).
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._state_dict_utils
import torch.distributed.checkpoint.state_dict
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager as _StateDictStager
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import BlockingAsyncStager as _BlockingStager
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import _foreach_supported_types as _optimizer_foreach_types

from brigade import _C
from brigade._full_state_dict import gather_full, leaves, shard_optimizer_state
from brigade._sharded_tensors import ShardedParameter, TensorShard, as_shard
from brigade._sharded_units import keep_sharded
from brigade._tensor_parallel import TensorParallelParameter, TensorParallelShard
from brigade._tensor_trees import map_tensors

_state_dict = torch.distributed.checkpoint.state_dict
_utils = torch.distributed._state_dict_utils


@functools.cache
def patch_torch() -> None:
    """Applies all patches once."""
    import torch._dynamo  # first: the next import alone is circular
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    # clip_grad_norm_() then computes all norms at once: one all-reduce instead of one per tensor.
    torch.utils._foreach_utils._foreach_supported_types += (TensorShard, TensorParallelShard)
    # Optimizers then use their foreach implementation where it is the default, on devices.
    _optimizer_foreach_types.extend((ShardedParameter, TensorParallelParameter))
    # Compiled code checks exact types in its first run, on torch 2.12 to 2.14.
    if hasattr(runtime_wrappers, "HANDLED_TYPES"):
        runtime_wrappers.HANDLED_TYPES += (ShardedParameter, TensorShard)
    clip = torch.nn.utils.clip_grad
    for owner, name, patch in (
        # Rejects mixed lists, which ranks would clip differently. Uses foreach on CPUs, too: one
        # all-reduce.
        (clip, "_get_total_norm", _total_norm),
        # Optimizer state is plain torch.Tensor; torch.distributed.checkpoint needs TensorShard.
        (torch.optim.Optimizer, "state_dict", _optimizer_state_dict),
        # Shards unsharded state, which torch would load unsharded.
        (torch.optim.Optimizer, "load_state_dict", _load_optimizer_state_dict),
        # get_state_dict() and set_state_dict() with full_state_dict=True support only DTensors.
        (_state_dict, "_gather_state_dict", _gather_state_dict),
        (_utils, "_gather_state_dict", _gather_state_dict),
        (_state_dict, "_distribute_state_dict", _shard_copied_values),
        (_utils, "_broadcast_tensors", _shard_copied_values),
        # dcp.async_save() copies storages; sharded tensors have none.
        (_StateDictStager, "_offload_tensor", _offload_tensor),
        (_BlockingStager, "stage", _stage),
        # The writer names several chunks of one tensor identically, so the last would overwrite
        # the others.
        (HuggingFaceStorageWriter, "prepare_local_plan", _require_one_chunk_per_tensor),
        (HuggingFaceStorageWriter, "prepare_global_plan", _require_one_writer_per_file),
        # Module.to_empty() replaces parameters on meta.
        (nn.Module, "_apply", _apply_in_place),
        # Lightning loads checkpoints only into modules with DTensors.
        *((owner, "_has_dtensor_modules", _has_sharded_tensors) for owner in _lightning()),
    ):
        setattr(owner, name, _patched(getattr(owner, name), patch))
    # Compiled optimizers would read a shard's memory; this makes their steps graph breaks.
    torch._dynamo.trace_rules.add("torch.optim")
    torch.nn.utils.get_total_norm = clip._get_total_norm
    register_module_parameter_registration_hook(keep_sharded)


def _apply_in_place(original: Callable, self: nn.Module, *args: Any, **options: Any) -> nn.Module:
    own = [item for item in self._parameters.items() if isinstance(item[1], ShardedParameter)]
    original(self, *args, **options)
    for name, parameter in own:
        if (value := self._parameters[name]) is not parameter:
            self._parameters[name] = parameter
            self.register_parameter(name, value)  # calls keep_sharded()
    return self


def _lightning() -> list[Any]:
    homes = (
        f"{name}.strategies.model_parallel" for name in ("lightning.fabric", "lightning_fabric")
    )
    found = [sys.modules.get(home) for home in homes]
    return [module for module in found if hasattr(module, "_has_dtensor_modules")]


def _patched(original: Callable, patch: Callable) -> Callable:
    """Returns a function, which binds as a method, that calls `patch` with the original first."""

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return patch(original, *args, **kwargs)

    return patched


def _total_norm(
    original: Callable,
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    num_sharded = sum(isinstance(tensor, TensorShard) for tensor in tensors)
    if 0 < num_sharded < len(tensors):
        raise NotImplementedError(
            f"total norm: expected sharded gradients only or none, found {num_sharded} of "
            f"{len(tensors)}: ranks would clip differently.\nClip the others separately."
        )
    if foreach is None and num_sharded > 0:
        foreach = True
    return original(tensors, norm_type, error_if_nonfinite, foreach)


def _optimizer_state_dict(original: Callable, self: torch.optim.Optimizer) -> dict[str, Any]:
    for parameter, values in self.state.items():
        if not isinstance(parameter, TensorShard):
            continue
        for value in values.values():
            if type(value) is torch.Tensor and _C.is_sharded(value):
                as_shard(value, parameter)
    return original(self)


def _load_optimizer_state_dict(
    original: Callable, self: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    parameters = [p for group in self.param_groups for p in group["params"]]
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    state = dict(state_dict["state"])
    for index, parameter in zip(saved, parameters, strict=False):  # torch checks the lengths
        if isinstance(parameter, TensorShard) and index in state:
            state[index] = shard_optimizer_state(parameter, state[index])
    original(self, {**state_dict, "state": state})


def _offload_tensor(
    original: Callable, self: Any, x: torch.Tensor, memo: dict, non_blocking: bool = False
) -> Any:
    if not isinstance(x, TensorShard):
        return original(self, x, memo, non_blocking)
    memo[id(x)] = _copy_on_cpu(x)
    return memo[id(x)]


def _stage(original: Callable, self: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    if not any(isinstance(value, TensorShard) for _, value in leaves(state_dict)):
        return original(self, state_dict)
    return copy.deepcopy(map_tensors(state_dict, _copy_on_cpu))


def _copy_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone().to("cpu")
    return as_shard(copied, tensor) if isinstance(tensor, TensorShard) else copied


def _has_sharded_tensors(original: Callable, module: object) -> bool:
    of_module = module.parameters() if isinstance(module, nn.Module) else ()
    return original(module) or any(isinstance(parameter, TensorShard) for parameter in of_module)


def _gather_state_dict(
    original: Callable, state_dict: dict[str, Any], **options: Any
) -> dict[str, Any]:
    if not any(isinstance(value, TensorShard) for _, value in leaves(state_dict)):
        return original(state_dict, **options)
    full = gather_full(state_dict, tuple(options.get("ranks_only", ())) == (0,))
    return original(full, **options)


def _shard_copied_values(
    original: Callable, found: dict[str, Any], own: dict[str, Any], *args: Any, **options: Any
) -> None:
    """Shards unsharded values that `original` copied from `found` into `own`."""
    shards = {key: value for key, value in own.items() if isinstance(value, TensorShard)}
    original(found, own, *args, **options)
    for key, shard in shards.items():
        value = own[key]
        if value is shard or not isinstance(value, torch.Tensor):
            continue
        if value.shape == shard.shape and not _C.is_sharded(value):
            own[key] = shard._shard_of(value)


def _require_one_chunk_per_tensor(original: Callable, self: Any, plan: SavePlan) -> SavePlan:
    for name, count in Counter(item.index.fqn for item in plan.items).items():
        if count > 1:
            raise NotImplementedError(
                f"HuggingFaceStorageWriter: expected one chunk per tensor and rank, found {count} "
                f"of '{name}'; all but one would be overwritten.\nSave with brigade.save_whole(), "
                "or shard with a block_numel_fn that keeps rows on one rank."
            )
    return original(self, plan)


def _require_one_writer_per_file(
    original: Callable, self: Any, plans: list[SavePlan]
) -> list[SavePlan]:
    writers = defaultdict(list)
    for rank, plan in enumerate(plans):
        for file in self._split_by_storage_plan(self.fqn_to_index_mapping, plan.items):
            if plan.items:
                writers[file].append(rank)
    for file, ranks in writers.items():
        if len(ranks) > 1 and not self.save_distributed:
            raise NotImplementedError(
                f"HuggingFaceStorageWriter: expected one rank to write file {file}, found ranks "
                f"{ranks}; each would overwrite the file.\nSet save_distributed=True, or save with "
                "brigade.save_whole()."
            )
    return original(self, plans)
