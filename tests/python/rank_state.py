"""State of a rank's process that a call may change for the next call."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer

import brigade._install

# Packages whose functions and classes tests replace.
_WATCHED = ("torch.autograd", "torch.distributed", "torch.nn", "torch.optim", "torch.utils")
_DTENSOR_STATISTICS = "_get_DTensor_sharding_propagator_cache_stats"
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
_SIGNALS = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_BRIGADE = os.path.dirname(os.path.abspath(brigade.__file__))
_REPLACEABLE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    type,
    property,
    staticmethod,
    classmethod,
)


def _is_watched(name: str) -> bool:
    return name in ("torch", "brigade") or name.startswith((*_WATCHED, "brigade."))


def _namespaces() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if not _is_watched(name):
            continue
        yield name, vars(module)
        for key, value in list(vars(module).items()):
            # Not isinstance(): some of torch's objects warn when their __class__ is read.
            if issubclass(type(value), type) and value.__module__ == name:
                yield f"{name}.{key}", vars(value)


# Computed before processes are forked, so that they share it.
_ATTRIBUTES = [
    (name, space, [(k, v) for k, v in space.items() if issubclass(type(v), _REPLACEABLE)])
    for name, space in _namespaces()
]
_GENERATOR = torch.default_generator.get_state()


def _is_lasting(value: Any) -> bool:
    """Returns True for permanent replacements: brigade's in torch, and torch's in optimizers."""
    if getattr(value, "hooked", False):  # Optimizer.step, wrapped by the class's first instance
        return True
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(_BRIGADE)


def _replaced() -> list[str]:
    return [
        f"{name}.{key}"
        for name, space, items in _ATTRIBUTES
        for key, value in items
        if space.get(key) is not value and not _is_lasting(space.get(key))
    ]


def _global_hooks() -> list[int]:
    """Returns the numbers of global hooks, except brigade's."""
    tables = [
        value
        for owner in (nn_module, torch_optimizer)
        for name, value in sorted(vars(owner).items())
        if name.startswith("_global_") and isinstance(value, dict)
    ]
    return [sum(not _is_lasting(hook) for hook in table.values()) for table in tables]


def _module_globals() -> dict[str, Any]:
    """Returns ids and sizes of the global variables of test modules."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not str(getattr(module, "__file__", None) or "").startswith(_FOLDER):
            continue
        for key, value in list(vars(module).items()):
            if key.startswith("__"):
                continue
            size = len(value) if isinstance(value, (dict, list, set)) else None
            found[f"{name}.{key}"] = id(value), size
    return found


class RankState:
    """A snapshot, which difference() compares with the state after a call."""

    def __init__(self) -> None:
        self._values = self._take()
        self._globals: dict[str, Any] = {}

    def begin_call(self) -> None:
        """Resets random generators and records the variables of loaded modules."""
        torch.default_generator.set_state(_GENERATOR)
        random.seed(0)
        self._globals = _module_globals()

    def difference(self) -> str | None:
        """Returns a description of one change by the call, or None."""
        gc.collect()
        if replaced := _replaced():
            return f"replaced {replaced}"
        now = self._take()
        for name, value in self._values.items():
            if value != now[name]:
                return f"{name}: {value} -> {now[name]}"
        after = _module_globals()
        for name, value in self._globals.items():
            if after.get(name) != value:
                return f"variable {name}"
        if (number := len(os.listdir("/proc/self/task"))) > 24:
            return f"{number} threads"
        if (number := len(os.listdir("/proc/self/fd"))) > 200:
            return f"{number} open files"
        return None

    @staticmethod
    def _take() -> dict[str, Any]:
        return {
            "process group": dist.is_initialized(),
            "rpc": dist.rpc._is_current_rpc_agent_set(),
            "install": bool(brigade._install._replaced),
            "global hooks": _global_hooks(),
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "threads of torch": torch.get_num_threads(),
            "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "anomaly mode": torch.is_anomaly_enabled(),
            "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            "modes": (
                torch._C._len_torch_function_stack(),
                torch._C._len_torch_dispatch_stack(),
                torch._C._autograd._saved_tensors_hooks_is_enabled(),
            ),
            "deterministic": (
                torch.get_deterministic_debug_mode(),
                torch.utils.deterministic.fill_uninitialized_memory,
                torch.get_float32_matmul_precision(),
                torch.backends.mkldnn.enabled,
            ),
            # DTensor's caches refer to the call's groups, which are destroyed afterwards.
            "DTensors": getattr(torch._C, _DTENSOR_STATISTICS, tuple)(),
            "compiled": dict(torch._dynamo.utils.counters),
            "threads": [each.name for each in threading.enumerate() if not each.daemon],
            "children": [child.pid for child in multiprocessing.active_children()],
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "path": list(sys.path),
            "warnings": list(warnings.filters),
            "limits": [resource.getrlimit(each) for each in _LIMITS],
            "signals": [signal.getsignal(each) for each in _SIGNALS],
            "streams": (id(sys.stdout), id(sys.stderr), sys.gettrace()),
            "collection": gc.isenabled(),
            "recursion": sys.getrecursionlimit(),
        }
