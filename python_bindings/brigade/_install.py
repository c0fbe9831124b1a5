"""Lets torch's names make brigade's classes, for programs that don't name brigade's.

torch's classes stay where they are, so that a program which binds, derives from or asks for one of
them, at any time, has the same class. install() changes the result of their construction.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._composable.fsdp
import torch.distributed.fsdp
import torch.nn.parallel.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from brigade import _checks
from brigade.distributed_data_parallel import DistributedDataParallel
from brigade.fully_shard import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)

_TorchDDP = torch.nn.parallel.distributed.DistributedDataParallel
_TorchFSDPModule = torch.distributed.fsdp.FSDPModule
_torch_init = _TorchDDP.__init__
_torch_setstate = _TorchDDP.__setstate__
# The modules that have the functions which install() replaces.
_HOMES = (
    torch.distributed.fsdp,
    torch.distributed.fsdp._fully_shard,
    sys.modules["torch.distributed.fsdp._fully_shard._fully_shard"],
    torch.distributed._composable.fsdp,
)
_torchs = {
    name: getattr(torch.distributed.fsdp, name)
    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
}

_MISSING = object()
# Owner, name, the value before and brigade's.
_replaced: list[tuple[Any, str, Any, Any]] = []


def install() -> contextlib.ExitStack:
    """Lets torch's DistributedDataParallel and fully_shard make brigade's, until uninstall().

    So do classes derived from torch's, defaults and partials that hold it, and
    pickles of it. Objects made meanwhile stay brigade's afterwards, and are
    pickled under the name that the program used: read where brigade isn't, they
    are torch's. Objects made before stay torch's; so does fully_shard where it
    was imported by name before, which a warning says, and on devices that are
    neither CPUs nor CUDA's.

    To be called on every rank, before models are wrapped: brigade's wrapper and
    torch's do not understand each other.

    ``isinstance`` holds for either class; ``type(model) is DistributedDataParallel``
    does not.

    Example::

        brigade.install()                     # for the rest of the program
        with brigade.install(): trainer.fit() # for a while
    """
    if _replaced:
        return contextlib.ExitStack()
    if bound := _bound_functions():
        warnings.warn(
            f"brigade.install(): torch's functions are bound as {_checks.some_of(bound)} already; "
            "these stay torch's.\nCall it before they are imported.",
            stacklevel=2,
        )
    _replace(_TorchDDP, "__init__", _init)
    _replace(_TorchDDP, "__setstate__", _setstate)
    for name, function in _OURS.items():
        for module in _HOMES:
            _replace(module, name, function)
    undone = contextlib.ExitStack()
    undone.callback(uninstall)
    return undone


def uninstall() -> None:
    """Lets torch's classes make their own again; without effect if they do."""
    while _replaced:
        owner, name, before, ours = _replaced.pop()
        if vars(owner).get(name) is not ours:
            continue  # somebody has wrapped it, and will find it passing on to torch's
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _replace(owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name):
        _replaced.append((owner, name, vars(owner).get(name, _MISSING), value))
        setattr(owner, name, value)


def _bound_functions() -> list[str]:
    """Names outside torch that hold functions which install() replaces."""
    return [
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and name.split(".")[0] not in ("torch", "brigade")
        for key, value in list(vars(module).items())
        if any(value is function for function in _torchs.values())
    ]


class _MadeUnderInstall(DistributedDataParallel):
    """Made through torch's class, or one derived from it, which is `_called`."""

    _called: type = _TorchDDP

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self).__reduce__ is not object.__reduce__:
            return super().__reduce_ex__(protocol)
        return copyreg._reconstructor, (self._called, object, None), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Stays brigade's after uninstall(), unlike a pickle.
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


@functools.cache
def _ours_for(called: type) -> type[DistributedDataParallel]:
    """`called`, with brigade's class between it and torch's."""
    bases = (_MadeUnderInstall,) if called is _TorchDDP else (called, _MadeUnderInstall)
    named = DistributedDataParallel if called is _TorchDDP else called
    names = {name: getattr(named, name) for name in ("__module__", "__qualname__", "__doc__")}
    return types.new_class(
        named.__name__, bases, exec_body=lambda space: space.update(names, _called=called)
    )


def _become_ours(instance: torch.nn.Module) -> None:
    object.__setattr__(instance, "__class__", _ours_for(type(instance)))


@functools.wraps(_torch_init)
def _init(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    if not _replaced:
        _torch_init(self, *args, **kwargs)
        return
    if not isinstance(self, DistributedDataParallel):
        _become_ours(self)
    DistributedDataParallel.__init__(self, *args, **kwargs)


@functools.wraps(_torch_setstate)
def _setstate(self: torch.nn.Module, state: dict[str, Any]) -> None:
    if not _replaced or isinstance(self, DistributedDataParallel):
        _torch_setstate(self, state)
    else:
        _become_ours(self)
        DistributedDataParallel.__setstate__(self, state)


def _passing_on(is_ours: Callable[[Any], bool], ours: Callable) -> Callable:
    """Torch's function of that name, with brigade's for a first argument that is brigade's."""
    torchs = _torchs[ours.__name__]

    @functools.wraps(torchs)
    def function(*args: Any, **kwargs: Any) -> Any:
        first = next(iter((*args, *kwargs.values())), None)
        return (ours if is_ours(first) else torchs)(*args, **kwargs)

    return function


@functools.wraps(_torchs["fully_shard"])
def _shard(module: Any, **kwargs: Any) -> Any:
    mesh, below = kwargs.get("mesh"), _sharded_below(module)
    if not _is_ours(below, mesh):
        return _torchs["fully_shard"](module, **kwargs)
    if mesh is None and dist.is_initialized():
        kwargs["mesh"] = _default_mesh(below)
    return fully_shard(module, **kwargs)


@functools.cache
def _mesh_of(kind: str, group: dist.ProcessGroup) -> DeviceMesh:
    return init_device_mesh(kind, (group.size(),))


def _default_mesh(below: list[FSDPModule]) -> DeviceMesh | None:
    """Of the accelerator, as torch chooses, or of modules sharded already; None: of CPUs."""
    part = next((part for each in below for part in each.parameters()), None)
    kind = torch._C._get_accelerator().type if part is None else part.device.type
    return None if kind == "cpu" else _mesh_of(kind, dist.group.WORLD)


def _sharded_below(module: Any) -> list[_TorchFSDPModule]:
    modules = module if isinstance(module, (list, tuple)) else [module]
    return [c for each in modules for c in each.modules() if isinstance(c, _TorchFSDPModule)]


def _is_ours(below: list[_TorchFSDPModule], mesh: Any) -> bool:
    """Whether brigade shards it; warns where torch does since its devices are others."""
    if below:
        return all(isinstance(child, FSDPModule) for child in below)
    kind = torch._C._get_accelerator().type if mesh is None else mesh.device_type
    if kind in ("cpu", "cuda"):
        return True
    warnings.warn(
        f"brigade.install(): fully_shard on devices of type '{kind}' is torch's: brigade shards on "
        "CPUs and CUDA devices so far.\nNothing is to be done.",
        stacklevel=3,
    )
    return False


_OURS = {
    "fully_shard": _shard,
    "register_fsdp_forward_method": _passing_on(
        lambda module: isinstance(module, FSDPModule), register_fsdp_forward_method
    ),
    "share_comm_ctx": _passing_on(
        lambda modules: any(isinstance(each, FSDPModule) for each in modules), share_comm_ctx
    ),
}
