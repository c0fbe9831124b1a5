"""Finds the bucket size that suits a model: times training steps under several of them.

    torchrun --standalone --nproc-per-node 2 -m brigade.bench my_training:workload

where ``workload`` is a function of the module ``my_training`` that gives a module
and one step of its training::

    def workload():
        torch.manual_seed(0)
        model = Net()
        inputs, targets = batch_of(dist.get_rank())
        return model, lambda model: F.cross_entropy(model(inputs), targets)

From Python: ``print(sweep(make_workload(workload)).table)``. C++ measures (bucket_sweep/).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from brigade import _C

__all__ = ["DEFAULT_SIZES", "Figures", "Workload", "find_factory", "make_workload", "sweep"]

DEFAULT_SIZES = ("each", "0.25", "1", "4", "10", "25", "100", "one")
_OPTIONS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")


@dataclass(frozen=True)
class Workload:
    """A module and one step of its training.

    Args:
        module: On the device where it is trained; the same on every rank.
        loss: Takes the module, runs its forward on this rank's
            data and returns the loss, a tensor of one element. Called once per
            step; all of it is timed.
        options: Arguments of DistributedDataParallel that the module is trained
            with, such as ``{"static_graph": True}``; no bucket sizes.
        name: Shown above the table; default: the module's class.

    Raises:
        TypeError: `module` is no module, or `loss` can't be called.
        ValueError: An option can't be had here, or no parameter is trained.
    """

    module: torch.nn.Module
    loss: Callable[[torch.nn.Module], torch.Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.module, torch.nn.Module) or isinstance(
            self.module, torch.nn.parallel.DistributedDataParallel
        ):
            raise TypeError(
                "brigade.bench: a workload's module must be a torch.nn.Module that is not "
                f"wrapped yet, got {type(self.module).__name__}.\nGive the module itself."
            )
        if not callable(self.loss):
            raise TypeError(
                "brigade.bench: a workload's loss must be a function of the module, got "
                f"{self.loss!r:.100}.\nGive one, such as "
                "lambda model: criterion(model(inputs), targets)."
            )
        unknown = sorted(set(self.options) - set(_OPTIONS))
        if unknown:
            raise ValueError(
                f"brigade.bench: a workload's options may be {', '.join(_OPTIONS)}; got "
                f"{', '.join(unknown)}.\nLeave it out."
            )
        if not self.parameters():
            raise ValueError(
                f"brigade.bench: {type(self.module).__name__} has no parameter that requires a "
                "gradient.\nGive a module that is trained."
            )

    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that are trained."""
        return [p for p in self.module.parameters() if p.requires_grad]

    def title(self) -> str:
        return self.name or type(self.module).__name__


def make_workload(factory: Callable[[], Any]) -> Workload:
    """The workload that `factory` gives, itself or as a pair of module and loss.

    Raises:
        TypeError: It gives something else.
    """
    made = factory()
    if isinstance(made, Workload):
        return made
    if isinstance(made, tuple) and len(made) == 2:
        return Workload(*made)
    raise TypeError(
        f"brigade.bench: {getattr(factory, '__name__', factory)}() must return a pair of a module "
        f"and a function of it that gives the loss, or a brigade.bench.Workload; it returned "
        f"{type(made).__name__}.\nEnd it with: return model, loss."
    )


def find_factory(name: str) -> Callable[[], Any]:
    """The function that ``package.module:function`` or ``path/to/file.py:function`` names.

    Raises:
        ValueError: There is no such module, file or function.
    """
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise ValueError(
            f"brigade.bench: expected module:function or file.py:function, got '{name}'.\n"
            "Name the function that makes the module and its loss."
        )
    module = _module_of_file(place) if place.endswith(".py") else _module_named(place)
    factory = getattr(module, function, None)
    if not callable(factory):
        raise ValueError(
            f"brigade.bench: {place} has no function '{function}'.\n"
            f"It has: {', '.join(n for n, v in vars(module).items() if callable(v)) or 'none'}."
        )
    return factory


def _module_of_file(path: str) -> Any:
    file = pathlib.Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"brigade.bench: there is no file {file}.\nGive another path.")
    sys.path.insert(0, str(file.parent))  # as if the file were run
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _module_named(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"brigade.bench: there is no module {error.name} in {', '.join(sys.path)}.\n"
            "Start in its folder, set PYTHONPATH, or give the path of its file."
        ) from error


@dataclass(frozen=True)
class Figures:
    """Measurements; the first row has the default's buckets."""

    table: str  # with a recommendation below
    data: dict[str, Any]  # the same


def sweep(
    workload: Workload,
    sizes: Sequence[str] = DEFAULT_SIZES,
    rounds: int = 8,
    steps: int = 3,
    group: dist.ProcessGroup | None = None,
    after_visit: Callable[[str], None] = lambda label: None,
) -> Figures:
    """Times steps with the default's buckets and with those of each size.

    Collective. The module's parameters keep their values and end without
    gradients; its buffers may change, as in training.

    Args:
        workload: Its steps are timed.
        sizes: MiB; or "each", a bucket for each parameter, or "one" for all. Those
            that give the same buckets are measured once.
        rounds: Visits to each size.
        steps: Timed in each visit.
        group: Default: the default group.
        after_visit: Called with a row's label, at most
            (sizes + 2) * (rounds + 1) times.

    Raises:
        ValueError: A size is none of these, `rounds` or `steps` is below 1, or the loss is
            not one number.
    """

    def loss() -> torch.Tensor:
        value = workload.loss(workload.module)
        _require_loss(value)
        return value

    table, data = _C.sweep(
        workload.title(),
        workload.parameters(),
        loss,
        list(sizes),
        dist.group.WORLD if group is None else group,
        rounds=rounds,
        steps=steps,
        after_visit=after_visit,
        **{name: workload.options.get(name, False) for name in _OPTIONS},
    )
    return Figures(table, json.loads(data))


def _require_loss(loss: torch.Tensor) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = (
            f"a tensor of {loss.numel()} elements, requires_grad={loss.requires_grad}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        raise ValueError(
            "brigade.bench: a workload's loss must return a tensor of one element that depends "
            f"on the module's parameters, it returned {found}.\nReturn the loss itself, without "
            "calling backward() or item()."
        )
