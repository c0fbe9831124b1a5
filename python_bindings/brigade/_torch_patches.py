"""Every change of torch that fully_shard() makes, each with its reason.

install() has its own, which put brigade's classes in the place of torch's (_install.py).
"""

from __future__ import annotations

import copy
import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._state_dict_utils
import torch.distributed.checkpoint.state_dict
from torch.distributed.checkpoint._state_dict_stager import StateDictStager as _StateDictStager
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import BlockingAsyncStager as _BlockingStager
from torch.optim.optimizer import _foreach_supported_types as _of_optimizers

from brigade import _C
from brigade._nests import map_tensors
from brigade._sharded_state import gather_nest, leaves_of, sharded_state
from brigade._sharded_tensors import ShardedParameter, TensorShard, as_shard

_state_dict = torch.distributed.checkpoint.state_dict
_utils = torch.distributed._state_dict_utils


@functools.cache
def patch_torch() -> None:
    """Once, by the first fully_shard()."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    # clip_grad_norm_() asks for all norms at once then: one all-reduce, not one for each.
    torch.utils._foreach_utils._foreach_supported_types.append(TensorShard)
    # Optimizers use lists where that is their default, on devices.
    _of_optimizers.append(ShardedParameter)
    clip = torch.nn.utils.clip_grad
    for owner, name, patch in (
        # Ranks would clip differently beside gradients that each rank has for itself; and norms of
        # a list are one all-reduce on CPUs, too.
        (clip, "_get_total_norm", _of_shards_alone),
        # An optimizer's state is torch.Tensor; torch.distributed.checkpoint asks for methods.
        (torch.optim.Optimizer, "state_dict", _with_shards),
        # Unsharded states, which torch would keep beside sharded parameters, are cut.
        (torch.optim.Optimizer, "load_state_dict", _sharding),
        # get_state_dict() and set_state_dict() with full_state_dict=True know DTensors only.
        (_state_dict, "_gather_state_dict", _gathering),
        (_state_dict, "_distribute_state_dict", _cutting),
        (_utils, "_broadcast_tensors", _cutting),
        # dcp.async_save() copies storages, which sharded tensors have none of.
        (_StateDictStager, "_offload_tensor", _staging),
        (_BlockingStager, "stage", _blocking),  # of file writers
        # It would write several boxes of one tensor by one name, of which the last remains.
        (HuggingFaceStorageWriter, "prepare_local_plan", _one_box_each),
        (HuggingFaceStorageWriter, "prepare_global_plan", _one_writer_each),
    ):
        setattr(owner, name, _patched(getattr(owner, name), patch))
    torch.nn.utils.get_total_norm = clip._get_total_norm


def _patched(of_torch: Callable, patch: Callable) -> Callable:
    """A function, to which methods bind: `patch`, which torch's own one is given first."""

    @functools.wraps(of_torch)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return patch(of_torch, *args, **kwargs)

    return patched


def _of_shards_alone(
    of_torch: Callable,
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    num_sharded = sum(isinstance(tensor, TensorShard) for tensor in tensors)
    if 0 < num_sharded < len(tensors):
        raise NotImplementedError(
            "a norm of sharded gradients together with others, which each rank has for itself: "
            "ranks would clip differently.\nClip them separately."
        )
    if foreach is None and num_sharded > 0:
        foreach = True
    return of_torch(tensors, norm_type, error_if_nonfinite, foreach)


def _with_shards(of_torch: Callable, self: torch.optim.Optimizer) -> dict[str, Any]:
    for parameter, values in self.state.items():
        if not isinstance(parameter, TensorShard):
            continue
        for value in values.values():
            if type(value) is torch.Tensor and _C.is_sharded(value):
                as_shard(value, parameter)
    return of_torch(self)


def _sharding(of_torch: Callable, self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    parameters = [p for group in self.param_groups for p in group["params"]]
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    state = dict(state_dict["state"])
    for index, parameter in zip(saved, parameters, strict=False):  # torch compares numbers
        if isinstance(parameter, TensorShard) and index in state:
            state[index] = sharded_state(parameter, state[index])
    of_torch(self, {**state_dict, "state": state})


def _staging(
    of_torch: Callable, self: Any, x: torch.Tensor, memo: dict, non_blocking: bool = False
) -> Any:
    if not isinstance(x, TensorShard):
        return of_torch(self, x, memo, non_blocking)
    memo[id(x)] = _copy_on_cpu(x)
    return memo[id(x)]


def _blocking(of_torch: Callable, self: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    if not any(isinstance(value, TensorShard) for _, value in leaves_of(state_dict)):
        return of_torch(self, state_dict)
    return copy.deepcopy(map_tensors(state_dict, _copy_on_cpu))


def _copy_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone().to("cpu")
    return as_shard(copied, tensor) if isinstance(tensor, TensorShard) else copied


def _gathering(of_torch: Callable, state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
    if not any(isinstance(value, TensorShard) for _, value in leaves_of(state_dict)):
        return of_torch(state_dict, **options)
    whole = gather_nest(state_dict, tuple(options.get("ranks_only", ())) == (0,))
    return of_torch(whole, **options)


def _cutting(
    of_torch: Callable, found: dict[str, Any], own: dict[str, Any], *args: Any, **options: Any
) -> None:
    """Of a function that copies values of one dict into another, by the same keys."""
    shards = {key: value for key, value in own.items() if isinstance(value, TensorShard)}
    of_torch(found, own, *args, **options)
    for key, shard in shards.items():
        value = own[key]
        if value is shard or not isinstance(value, torch.Tensor):
            continue
        if value.shape == shard.shape and not _C.is_sharded(value):
            own[key] = as_shard(_C.shard_like(value, shard), shard)


def _one_box_each(of_torch: Callable, self: Any, plan: SavePlan) -> SavePlan:
    for name, count in Counter(item.index.fqn for item in plan.items).items():
        if count > 1:
            raise NotImplementedError(
                f"HuggingFaceStorageWriter: expected one box of each tensor from a rank, found "
                f"{count} of '{name}', of which all but one would be lost.\nSave by "
                "brigade.save_whole(), or shard with block_numel_fn, so that no row is cut."
            )
    return of_torch(self, plan)


def _one_writer_each(of_torch: Callable, self: Any, plans: list[SavePlan]) -> list[SavePlan]:
    writers = defaultdict(list)
    for rank, plan in enumerate(plans):
        for file in self._split_by_storage_plan(self.fqn_to_index_mapping, plan.items):
            if plan.items:
                writers[file].append(rank)
    for file, ranks in writers.items():
        if len(ranks) > 1 and not self.save_distributed:
            raise NotImplementedError(
                f"HuggingFaceStorageWriter: expected one rank to write file {file}, found "
                f"{ranks}, of which what the last has written would remain.\nGive it "
                "save_distributed=True, or save by brigade.save_whole()."
            )
    return of_torch(self, plans)
