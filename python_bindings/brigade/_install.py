"""install(): torch's DistributedDataParallel and fully_shard construct brigade's.

torch's classes are not replaced: references, subclasses and isinstance() checks stay valid.
install() patches their construction instead.
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
from brigade._sharded_units import unit_of
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
# Modules that export the replaced functions.
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
# Owner, name, original value, brigade's value.
_replaced: list[tuple[Any, str, Any, Any]] = []


def install() -> contextlib.ExitStack:
    """Makes torch's DistributedDataParallel and fully_shard construct brigade's, until uninstall().

    Call it on every rank before models are wrapped: brigade's and torch's wrappers do not
    communicate with each other. Subclasses of torch's class, partials that hold it and its pickles
    construct brigade's, too.

    Not affected: objects made before, functions that were imported by name before
    (``from torch.distributed.fsdp import fully_shard``), and fully_shard on devices other than
    CPUs and CUDA devices.

    Objects made meanwhile stay brigade's after uninstall(). Their pickles name torch's class, so
    that a process without brigade loads torch's wrapper. ``isinstance`` holds for both classes;
    ``type(model) is DistributedDataParallel`` does not.

    Returns:
        A context manager whose exit calls uninstall(). Without effect if installed already.

    Warns:
        UserWarning: Names modules that imported torch's functions before.

    For example:

        brigade.install()  # for the rest of the program

        with brigade.install():  # for one block
            trainer.fit()
    """
    if _replaced:
        return contextlib.ExitStack()
    if bound := _bound_functions():
        warnings.warn(
            f"brigade.install(): torch's functions are already imported as "
            f"{_checks.some_of(bound)}; these stay torch's.\nCall install() before these imports.",
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
    """Reverts install(); without effect if it is not installed.

    Objects that were made meanwhile stay brigade's.
    """
    while _replaced:
        owner, name, before, ours = _replaced.pop()
        if vars(owner).get(name) is not ours:
            continue  # wrapped since; brigade's function now calls torch's
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _replace(owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name):
        _replaced.append((owner, name, vars(owner).get(name, _MISSING), value))
        setattr(owner, name, value)


def _bound_functions() -> list[str]:
    """Returns names outside torch that are bound to the functions that install() replaces."""
    return [
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and name.split(".")[0] not in ("torch", "brigade")
        for key, value in list(vars(module).items())
        if any(value is function for function in _torchs.values())
    ]


class _MadeUnderInstall(DistributedDataParallel):
    """An object that was constructed through `_called`, torch's class or a subclass of it."""

    _called: type = _TorchDDP

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self).__reduce__ is not object.__reduce__:
            return super().__reduce_ex__(protocol)
        return copyreg._reconstructor, (self._called, object, None), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy by pickling would be torch's after uninstall().
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


@functools.cache
def _ours_for(called: type) -> type[DistributedDataParallel]:
    """Returns a subclass of `called` with brigade's class between `called` and torch's."""
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


def _dispatched(is_ours: Callable[[Any], bool], ours: Callable) -> Callable:
    """Returns a function that calls `ours` if `is_ours(first argument)`, otherwise torch's."""
    torchs = _torchs[ours.__name__]

    @functools.wraps(torchs)
    def function(*args: Any, **kwargs: Any) -> Any:
        first = next(iter((*args, *kwargs.values())), None)
        return (ours if is_ours(first) else torchs)(*args, **kwargs)

    return function


@functools.wraps(_torchs["fully_shard"])
def _shard(module: Any, **kwargs: Any) -> Any:
    mesh, submodules = kwargs.get("mesh"), _sharded_submodules(module)
    if not _shards_with_brigade(submodules, mesh):
        return _torchs["fully_shard"](module, **kwargs)
    if mesh is None and dist.is_initialized():
        kwargs["mesh"] = _default_mesh(submodules)
    return fully_shard(module, **kwargs)


_shard.state = lambda module: unit_of(module) or _torchs["fully_shard"].state(module)


@functools.cache
def _mesh_of(kind: str, group: dist.ProcessGroup) -> DeviceMesh:
    return init_device_mesh(kind, (group.size(),))


def _default_mesh(submodules: list[FSDPModule]) -> DeviceMesh | None:
    """Returns a mesh of the submodules' device type, otherwise torch's default; None for CPUs."""
    first = next((parameter for each in submodules for parameter in each.parameters()), None)
    kind = torch._C._get_accelerator().type if first is None else first.device.type
    return None if kind == "cpu" else _mesh_of(kind, dist.group.WORLD)


def _sharded_submodules(module: Any) -> list[_TorchFSDPModule]:
    modules = module if isinstance(module, (list, tuple)) else [module]
    return [c for each in modules for c in each.modules() if isinstance(c, _TorchFSDPModule)]


def _shards_with_brigade(submodules: list[_TorchFSDPModule], mesh: Any) -> bool:
    """Returns False if torch's fully_shard is to be used; warns if that is for the device type."""
    if submodules:
        return all(isinstance(child, FSDPModule) for child in submodules)
    kind = torch._C._get_accelerator().type if mesh is None else mesh.device_type
    if kind in ("cpu", "cuda"):
        return True
    warnings.warn(
        f"brigade.install(): fully_shard on '{kind}' devices is torch's: brigade supports CPUs and "
        "CUDA devices.",
        stacklevel=3,
    )
    return False


_OURS = {
    "fully_shard": _shard,
    "register_fsdp_forward_method": _dispatched(
        lambda module: isinstance(module, FSDPModule), register_fsdp_forward_method
    ),
    "share_comm_ctx": _dispatched(
        lambda modules: any(isinstance(each, FSDPModule) for each in modules), share_comm_ctx
    ),
}
