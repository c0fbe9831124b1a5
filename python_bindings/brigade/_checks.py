"""Checks of the arguments of DistributedDataParallel, with the words of torch's errors."""

from __future__ import annotations

import contextlib
import inspect
import numbers
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from brigade import _C

_LARGEST_CAP_MIB = 2**40
_LATE_S = 3.0


def require(holds: object, error: type[Exception], text: str) -> None:
    """Raises `error` with DistributedDataParallel's name and `text` unless `holds`."""
    if not holds:
        raise error(f"DistributedDataParallel: {text}")


def require_type(wanted: type, **arguments: Any) -> None:
    """Raises TypeError naming the first argument that is neither None nor a `wanted`."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, wanted):
            raise TypeError(
                f"DistributedDataParallel: {name} must be a "
                f"{wanted.__module__}.{wanted.__qualname__}, got "
                f"{type(value).__name__}: {value!r:.100}."
            )


def bytes_of_cap(name: str, mib: Any) -> int:
    require(
        isinstance(mib, numbers.Real),
        TypeError,
        f"{name} must be numbers of MiB, got {type(mib).__name__}: {mib!r:.100}.",
    )
    require(
        0 <= mib < _LARGEST_CAP_MIB,
        ValueError,
        f"{name} must be at least 0 and less than {_LARGEST_CAP_MIB:.0e} MiB, got {mib}.\nGive "
        "25, or leave it out.",
    )
    return max(1, int(mib * 1024 * 1024))  # one bucket per parameter


def plan_of(bucket_plan: Any) -> list[list[int]]:
    wrong = "bucket_plan must be sequences of indices of parameters, got "
    advice = ".\nGive the result of bucket_plan(), or leave it out."
    try:
        plan = [[operator.index(i) for i in bucket] for bucket in bucket_plan]
    except TypeError:
        raise TypeError(f"DistributedDataParallel: {wrong}{bucket_plan!r:.100}{advice}") from None
    for i in (i for bucket in plan for i in bucket):
        require(i >= 0, ValueError, f"{wrong}{i}{advice}")
    return plan


def process_group_of(
    process_group: dist.ProcessGroup | None, device_mesh: Any
) -> dist.ProcessGroup:
    """The group to reduce over: given, of a 1-D mesh, or the default one."""
    require_type(dist.ProcessGroup, process_group=process_group)
    require_type(dist.DeviceMesh, device_mesh=device_mesh)
    if device_mesh is None and process_group is None:
        return dist.distributed_c10d._get_default_group()
    if device_mesh is None:
        # Sums would be divided by another number of ranks than they are taken over.
        size, in_cpp = process_group.size(), dist.ProcessGroup.size(process_group)
        require(
            in_cpp == size,
            RuntimeError,
            f"{type(process_group).__name__} says in Python that it has {size} ranks, and {in_cpp} "
            "where C++ asks.\nGive rank and size to torch.distributed.ProcessGroup.__init__() in "
            "the class's own __init__().",
        )
        return process_group
    require(
        process_group is None,
        RuntimeError,
        "process_group and device_mesh are both given.\nGive one of them.",
    )
    require(
        device_mesh.ndim == 1,
        RuntimeError,
        f"device_mesh must have 1 dimension, it has {device_mesh.ndim}: {device_mesh}.\nGive a "
        "slice of it, such as mesh['data'].",
    )
    return device_mesh.get_group(mesh_dim=0)


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


def require_comm_hook(hook: Callable[..., Any]) -> None:
    if not callable(hook):
        raise TypeError(
            f"register_comm_hook: Communication hook must be callable, got {hook!r}.\n"
            "Give a function of a state and a torch.distributed.GradBucket."
        )
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (NameError, TypeError, ValueError):  # annotations that only a type checker understands
        return
    found = {"return": signature.return_annotation}
    if "bucket" in signature.parameters:
        found["bucket"] = signature.parameters["bucket"].annotation
    wanted = {
        "bucket": ("dist.GradBucket", dist.GradBucket),
        "return": ("torch.futures.Future[torch.Tensor]", torch.futures.Future[torch.Tensor]),
    }
    for part, annotation in found.items():
        name, kind = wanted[part]
        if annotation not in (inspect.Signature.empty, kind):
            raise ValueError(
                f"register_comm_hook: Communication hook: {part} annotation should be {name}; "
                f"that of {name_of(hook)} is {annotation}.\nCorrect the annotation, or leave it "
                "out."
            )


def name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def some_of(names: Sequence[str], limit: int = 5) -> str:
    """The first names, quoted, and how many more there are."""
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    more = len(names) - limit
    return f"{shown} and {more} more" if more > 0 else shown
