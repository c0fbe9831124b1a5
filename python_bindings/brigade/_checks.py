"""Checks of the arguments of DistributedDataParallel.

Each function raises, or returns its finding. Errors have the words of torch's that programs look
for.
"""

from __future__ import annotations

import contextlib
import inspect
import numbers
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from brigade import _C

_LARGEST_CAP_MIB = 2**40
_MODULE_CHECKS = ("error", "warn", "off")
_LATE_S = 3.0


def require_type(wanted: type, **arguments: Any) -> None:
    """Raises TypeError naming the first argument that is neither None nor a `wanted`."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, wanted):
            raise TypeError(
                f"DistributedDataParallel: {name} must be a {wanted.__module__}."
                f"{wanted.__qualname__}, got {type(value).__name__}: {value!r:.100}."
            )


def bytes_of_cap(name: str, mib: Any) -> int:
    """A bucket's size in bytes, given in MiB.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative, not finite, or larger than any memory.
    """
    if not isinstance(mib, numbers.Real):
        raise TypeError(
            f"DistributedDataParallel: {name} must be numbers of MiB, got "
            f"{type(mib).__name__}: {mib!r:.100}."
        )
    if not 0 <= mib < _LARGEST_CAP_MIB:
        raise ValueError(
            f"DistributedDataParallel: {name} must be at least 0 and less than "
            f"{_LARGEST_CAP_MIB:.0e} MiB, got {mib}.\nGive 25, or leave it out."
        )
    return max(1, int(mib * 1024 * 1024))  # one bucket per parameter


def require_module(module: Any) -> None:
    """Raises TypeError unless there is a module, and no class."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"DistributedDataParallel: module must be a torch.nn.Module, got {module!r:.100}.\n"
            "Give an instance."
        )


def require_arguments_fit(
    delayed: list[Any],
    param_to_hook_all_reduce: Any,
    mixed_precision: Any,
    find_unused_parameters: bool,
    check_module: Any,
) -> None:
    """Raises TypeError, ValueError or RuntimeError for the first argument that is wrong."""
    if mixed_precision is not None and find_unused_parameters:
        raise RuntimeError(
            "DistributedDataParallel: find_unused_parameters must be False with mixed_precision, "
            "which swaps the parameters that are looked for in the graph.\n"
            "Set static_graph=True instead, or use torch.autocast."
        )
    for pair in delayed:
        match pair:
            case (str(), torch.Tensor()):
                continue
        raise TypeError(
            "DistributedDataParallel: delay_all_reduce_named_params must have pairs of a name "
            f"and a parameter, got {pair!r:.100}."
        )
    require_type(torch.Tensor, param_to_hook_all_reduce=param_to_hook_all_reduce)
    if param_to_hook_all_reduce is not None and not param_to_hook_all_reduce.requires_grad:
        raise ValueError(
            "DistributedDataParallel: param_to_hook_all_reduce must require a gradient, which its "
            "hook waits for; it is frozen.\nGive the parameter whose gradient comes last."
        )
    if check_module not in _MODULE_CHECKS:
        raise ValueError(
            "DistributedDataParallel: check_module must be one of "
            f"{', '.join(_MODULE_CHECKS)}, got {check_module!r:.100}.\nLeave it out for 'error'."
        )


def plan_of(bucket_plan: Any) -> list[list[int]]:
    """Indices of parameters by bucket, as lists; TypeError or ValueError if they can't be."""
    wrong = "DistributedDataParallel: bucket_plan must be sequences of indices of parameters, got "
    advice = ".\nGive the result of bucket_plan(), or leave it out."
    try:
        plan = [[operator.index(i) for i in bucket] for bucket in bucket_plan]
    except TypeError:
        raise TypeError(f"{wrong}{bucket_plan!r:.100}{advice}") from None
    for i in (i for bucket in plan for i in bucket if i < 0):
        raise ValueError(f"{wrong}{i}{advice}")
    return plan


def process_group_of(
    process_group: dist.ProcessGroup | None, device_mesh: Any
) -> dist.ProcessGroup:
    """The group to reduce over: given, of a 1-D mesh, or the default one.

    Raises:
        RuntimeError: Both are given, the mesh has more than one dimension, or a group written
            in Python has another size than C++ sees.
        TypeError: They are something else.
    """
    require_type(dist.ProcessGroup, process_group=process_group)
    require_type(dist.DeviceMesh, device_mesh=device_mesh)
    if device_mesh is None and process_group is not None:
        _require_one_size(process_group)
        return process_group
    if device_mesh is None:
        return dist.distributed_c10d._get_default_group()
    if process_group is not None:
        raise RuntimeError(
            "DistributedDataParallel: process_group and device_mesh are both given.\n"
            "Give one of them."
        )
    if device_mesh.ndim != 1:
        raise RuntimeError(
            f"DistributedDataParallel: device_mesh must have 1 dimension, it has "
            f"{device_mesh.ndim}: {device_mesh}.\nGive a slice of it, such as mesh['data']."
        )
    return device_mesh.get_group(mesh_dim=0)


def _require_one_size(group: dist.ProcessGroup) -> None:
    """Sums would be divided by another number of ranks than they are taken over."""
    in_cpp = dist.ProcessGroup.size(group)
    if in_cpp != group.size():
        raise RuntimeError(
            f"DistributedDataParallel: {type(group).__name__} says in Python that it has "
            f"{group.size()} ranks, and {in_cpp} where C++ asks.\nGive rank and size to "
            "torch.distributed.ProcessGroup.__init__() in the class's own __init__()."
        )


@contextlib.contextmanager
def failure_told_to_peers(
    group: dist.ProcessGroup | None, tell: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Makes the peers raise an error inside too, in their next require_agreement().

    Collective where something is raised, unless `group` is None. `tell` takes the place of
    require_agreement() where the peers' next collective is another one.
    Prints the error to stderr while peers are late. Nothing inside communicates.
    """
    try:
        yield
    except Exception as error:
        if group is not None:
            failure = f"{type(error).__name__}: {error}"
            text = f"brigade: waiting to tell the other ranks: {failure}"
            late = threading.Timer(_LATE_S, print, [text], {"file": sys.stderr, "flush": True})
            late.daemon = True
            late.start()
            try:
                tell(failure) if tell else _C.require_agreement(group, "option", [], failure)
            except (RuntimeError, ValueError):
                pass  # this rank's own error stands, whatever became of its peers
            finally:
                late.cancel()
        raise


def require_trainable(module: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError unless there is something to reduce."""
    if not any(parameter.requires_grad for parameter in parameters):
        raise RuntimeError(
            f"DistributedDataParallel: {type(module).__name__} has no parameter that requires a "
            "gradient, so there is nothing to reduce.\nUse the module as it is."
        )


def require_initialized(module: torch.nn.Module, named: dict[str, torch.Tensor]) -> None:
    """Raises RuntimeError if a lazy parameter has no shape yet."""
    lazy = [
        name
        for name, parameter in named.items()
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter)
    ]
    if lazy:
        raise RuntimeError(
            f"DistributedDataParallel: {type(module).__name__} has uninitialized parameters, which "
            f"have no shape yet: {some_of(lazy)}.\n"
            "Run one forward on a small input before wrapping the module."
        )


def device_type_of(module: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> str:
    """The type of device that all parameters are on; ValueError if there are several."""
    types = sorted({parameter.device.type for parameter in parameters})
    if len(types) != 1:
        raise ValueError(
            f"DistributedDataParallel: the parameters of {type(module).__name__} must be on one "
            f"type of device, they are on {', '.join(types)}.\nMove the module to one of them."
        )
    return types[0]


def require_no_device_ids(
    device_ids: Sequence[Any] | None, output_device: Any, parameters: Sequence[torch.Tensor]
) -> None:
    """Raises ValueError if devices are given for a module that stays where it is."""
    if device_ids or output_device:
        devices = sorted({str(parameter.device) for parameter in parameters})
        raise ValueError(
            "DistributedDataParallel: device_ids and output_device are for a module on one "
            f"accelerator; this one is on {', '.join(devices)}, and device_ids={device_ids}, "
            f"output_device={output_device} were given.\nLeave them out."
        )


def require_one_device_id(device_ids: Sequence[Any]) -> None:
    """Raises ValueError unless there is exactly one."""
    if len(device_ids) != 1:
        raise ValueError(
            f"DistributedDataParallel: device_ids must name one device, got {list(device_ids)}.\n"
            "Start one process per device."
        )


def require_sums_of_our_own(**arguments: bool) -> None:
    """Raises RuntimeError naming the first that lets others sum gradients, beside reproducible."""
    for name, is_given in arguments.items():
        if is_given:
            raise RuntimeError(
                f"DistributedDataParallel: reproducible can't be given with {name}, whose sums are "
                "not in the order of the ranks.\nLeave out one of them."
            )


def require_both_or_none(**arguments: Any) -> None:
    """Raises ValueError if some of the arguments are given and others are not."""
    missing = [name for name, value in arguments.items() if value is None]
    if missing and len(missing) < len(arguments):
        raise ValueError(
            f"DistributedDataParallel: {' and '.join(arguments)} belong together, but "
            f"{' and '.join(missing)} is missing.\nGive both or none."
        )


def require_process(process: int) -> None:
    """Raises RuntimeError in a fork of the process with that number."""
    if os.getpid() != process:
        raise RuntimeError(
            f"DistributedDataParallel: the model was wrapped in process {process}; this is a "
            f"fork of it, {os.getpid()}, in which the process group has no threads.\n"
            "Use the wrapped module itself, or start a process with a group of its own."
        )


def require_comm_hook(hook: Callable[..., Any]) -> None:
    """Raises TypeError or ValueError if `hook` can't be a comm hook."""
    name = name_of(hook)
    if not callable(hook):
        raise TypeError(
            f"register_comm_hook: Communication hook must be callable, got {hook!r}.\n"
            "Give a function of a state and a torch.distributed.GradBucket."
        )
    signature = _signature_of(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (inspect.Parameter.empty, dist.GradBucket):
        raise ValueError(
            "register_comm_hook: Communication hook: bucket annotation should be dist.GradBucket; "
            f"that of {name} is {bucket.annotation}.\nCorrect the annotation, or leave it out."
        )
    if signature.return_annotation not in (
        inspect.Signature.empty,
        torch.futures.Future[torch.Tensor],
    ):
        raise ValueError(
            "register_comm_hook: Communication hook: return annotation should be "
            f"torch.futures.Future[torch.Tensor]; that of {name} is "
            f"{signature.return_annotation}.\nCorrect the annotation, or leave it out."
        )


def _signature_of(hook: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(hook, eval_str=True)
    except (NameError, TypeError, ValueError):  # annotations that only a type checker understands
        return inspect.Signature()


def name_of(hook: Any) -> str:
    """For messages and logging data."""
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def some_of(names: Sequence[str], limit: int = 5) -> str:
    """The first names, quoted, and how many more there are."""
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    more = len(names) - limit
    return f"{shown} and {more} more" if more > 0 else shown
