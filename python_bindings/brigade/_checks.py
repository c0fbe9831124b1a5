"""Argument checks of DistributedDataParallel and fully_shard; errors contain torch's words."""

from __future__ import annotations

import contextlib
import functools
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


class AssertedValueError(ValueError, AssertionError):
    """ValueError where torch raises AssertionError."""


class AssertedNotImplementedError(NotImplementedError, AssertionError):
    """NotImplementedError where torch raises AssertionError."""


_LARGEST_CAP_MIB = 2**40
_LATE_S = 3.0  # then a rank that waits with its error prints it


def describe_error(error: BaseException) -> str:
    """Returns "ValueError: text", which UTF-8 can encode, also if str(error) raises."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text.encode(errors="backslashreplace").decode()


def require(holds: object, error: type[Exception], text: str) -> None:
    """Raises `error` with the text "DistributedDataParallel: {text}" unless `holds`."""
    if not holds:
        raise error(f"DistributedDataParallel: {text}")


def require_type(wanted: type, **arguments: Any) -> None:
    """Raises TypeError for the first argument that is neither None nor a `wanted`."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, wanted):
            raise TypeError(
                f"DistributedDataParallel: {name} must be a "
                f"{wanted.__module__}.{wanted.__qualname__}, got "
                f"{type(value).__name__}: {value!r:.100}."
            )


def require_count(value: object, name: str, least: int = 1) -> int:
    """Returns fully_shard()'s argument `name`. Raises ValueError unless it is an int >= `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"fully_shard: {name}: expected an integer >= {least}, found {value!r}.")
    return value


def cap_in_bytes(name: str, mib: Any) -> int:
    require(
        isinstance(mib, numbers.Real),
        TypeError,
        f"{name} must be a number (MiB), got {mib!r:.100}.",
    )
    require(
        0 <= mib < _LARGEST_CAP_MIB,
        ValueError,
        f"{name} must be >= 0 and < {_LARGEST_CAP_MIB:.0e} MiB, got {mib}.\nThe default is 25.",
    )
    return max(1, int(mib * 1024 * 1024))  # 0 MiB: one bucket per parameter


def checked_plan(bucket_plan: Any) -> list[list[int]]:
    wrong = "bucket_plan must be a list of lists of parameter indices, got "
    advice = '.\nPass "auto" or the result of bucket_plan(), or leave it out.'
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
    """Returns the given group, the group of a 1-D mesh, or the default group."""
    require_type(dist.ProcessGroup, process_group=process_group)
    require_type(dist.DeviceMesh, device_mesh=device_mesh)
    if device_mesh is None and process_group is None:
        return dist.distributed_c10d._get_default_group()
    if device_mesh is None:
        # Averages divide by one of the two sizes and sum over the other.
        size, in_cpp = process_group.size(), dist.ProcessGroup.size(process_group)
        require(
            in_cpp == size,
            RuntimeError,
            f"{type(process_group).__name__}.size() must be equal in Python and C++, got {size} in "
            f"Python and {in_cpp} in C++.\nPass rank and size to "
            "torch.distributed.ProcessGroup.__init__() in the class's __init__().",
        )
        return process_group
    require(
        process_group is None,
        RuntimeError,
        "process_group and device_mesh exclude each other.\nPass one of them.",
    )
    require(
        device_mesh.ndim == 1,
        RuntimeError,
        f"device_mesh must have 1 dimension, got {device_mesh.ndim}: {device_mesh}.\nPass a slice "
        "of it, for example mesh['data'].",
    )
    return device_mesh.get_group(mesh_dim=0)


@contextlib.contextmanager
def raises_on_all_ranks(
    group: dist.ProcessGroup | None, send: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Context manager without communication: the peers raise its exception, too.

    They raise in their next require_agreement(), or in the collective that matches `send`. The
    error is printed to stderr if they are late. With `group` None, only this rank raises.
    """
    try:
        yield
    except Exception as error:
        if group is not None:
            failure = describe_error(error)
            text = f"brigade: waiting to send an error to the other ranks: {failure}"
            late = threading.Timer(_LATE_S, print, [text], {"file": sys.stderr, "flush": True})
            late.daemon = True
            late.start()
            try:
                send(failure) if send else _C.require_agreement(group, "option", [], failure)
            except (RuntimeError, ValueError):
                pass  # this rank raises its own error
            finally:
                late.cancel()
        raise


def require_comm_hook(hook: Callable[..., Any]) -> None:
    if not callable(hook):
        raise TypeError(
            f"register_comm_hook: Communication hook must be callable, got {hook!r}.\n"
            "Pass a function of a state and a torch.distributed.GradBucket."
        )
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (NameError, TypeError, ValueError):  # annotations that can't be evaluated
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
                f"register_comm_hook: Communication hook: {part} annotation should be {name}, got "
                f"{annotation} for {hook_name(hook)}.\nCorrect or remove the annotation."
            )


def hook_name(hook: Any) -> str:
    """Returns the name by which ranks compare a hook, equal in all processes.

    The qualified name of a function or of the object's type. Lambdas and local functions add file
    and line.
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    code = getattr(hook, "__code__", None)
    if "<" not in name or code is None:
        return name
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def some_of(names: Sequence[str], limit: int = 5) -> str:
    """Quotes the first `limit` names and counts the others."""
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    more = len(names) - limit
    return f"{shown} and {more} more" if more > 0 else shown
