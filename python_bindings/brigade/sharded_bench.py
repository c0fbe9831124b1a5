"""Times sharded training steps with several settings: `brigade bench FACTORY --units CLASS`."""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from brigade import bench
from brigade.fully_shard import fully_shard

Factory = Callable[[], Any]  # returns a module, a function of its loss, ...
Shard = Callable[[nn.Module, list[nn.Module]], None]
_WARM_UP_STEPS = 2  # the first one records the order of units
_SIGNIFICANCE = 0.05


def _shard(
    module: nn.Module, units: list[nn.Module], function: Any, at_once: int, **settings: Any
) -> None:
    for begin in range(0, len(units), at_once):
        unit = units[begin : begin + at_once]
        function(unit if len(unit) > 1 else unit[0], **settings)
    function(module)


def arms_of(num_units: int) -> dict[str, Shard]:
    """Returns the settings to compare, by name; the first is the default."""
    arms: dict[str, Shard] = {}
    for reshard in (True, False):
        for depth, at_once in ((1, 1), (2, 1), (1, 2), (1, 4)):
            if at_once > 1 and num_units < 2 * at_once:
                continue
            name = f"reshard_after_forward={reshard}"
            name += f", prefetch_depth={depth}" if depth > 1 else ""
            name += f", {at_once} modules per unit" if at_once > 1 else ""
            settings = {"reshard_after_forward": reshard, "prefetch_depth": depth}
            arms[name] = partial(_shard, function=fully_shard, at_once=at_once, **settings)
        arms[f"torch's fully_shard, {reshard}"] = partial(
            _shard,
            function=torch.distributed.fsdp.fully_shard,
            at_once=1,
            reshard_after_forward=reshard,
        )
    return arms


def _step_seconds(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> float:
    for parameter in model.parameters():
        parameter.grad = None
    dist.barrier()
    begin = time.perf_counter()
    loss(model).backward()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def _units_of(module: nn.Module, unit_class: str) -> list[nn.Module]:
    units = [child for child in module.modules() if type(child).__name__ == unit_class]
    if not units:
        classes = ", ".join(sorted({type(child).__name__ for child in module.modules()}))
        raise ValueError(
            f"--units: expected a class of the model's modules, found {unit_class!r}.\n"
            f"The model has {classes}."
        )
    return units


def _turn_ms(factory: Factory, unit_class: str, shard: Shard, steps: int) -> float:
    """Returns the median step of the slowest rank. The model lives for this turn alone."""
    module, loss = factory()[:2]
    shard(module, _units_of(module, unit_class))
    for _ in range(_WARM_UP_STEPS):
        _step_seconds(module, loss)
    found = torch.tensor([_step_seconds(module, loss) for _ in range(steps)])
    found = found.to(next(module.parameters()).device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    del module, loss
    gc.collect()
    return 1e3 * found.median().item()


def _is_decided(times: list[float], default: list[float], candidates: int) -> bool:
    """A sign test over the rounds, corrected for the number of settings."""
    rounds = len(times)
    faster = sum(a < b for a, b in zip(times, default, strict=True))
    chance = sum(math.comb(rounds, k) for k in range(faster, rounds + 1)) / 2**rounds
    return candidates * chance <= _SIGNIFICANCE


def measure(
    factory: Factory,
    unit_class: str,
    rounds: int,
    steps: int,
    after_round: Callable[[dict[str, Any]], None] = lambda figures: None,
) -> dict[str, Any]:
    """Times each setting in turns; collective. Each turn has a model of its own by `factory`.

    Raises:
        ValueError: The model has no module of that class, or there are fewer than 2 rounds.
    """
    if rounds < 2 or steps < 1:
        raise ValueError(f"bench: expected 2 rounds and 1 step or more, found {rounds}, {steps}")
    module = factory()[0]
    arms = arms_of(len(_units_of(module, unit_class)))
    figures: dict[str, Any] = {
        "name": type(module).__name__,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "units": len(_units_of(module, unit_class)),
        "rounds": rounds,
        "rounds_taken": 0,
        "steps": steps,
        "arms": [],
    }
    del module
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    order, default = list(arms), next(iter(arms))
    for done in range(1, rounds + 1):
        for arm in order:
            times[arm].append(_turn_ms(factory, unit_class, arms[arm], steps))
        order.reverse()
        if done == 1:
            continue  # quartiles need two
        figures["rounds_taken"] = done
        figures["arms"] = [
            {
                "name": arm,
                "rounds_ms": of_arm,
                "step_ms": bench.quartiles(of_arm),
                "over_default": bench.quartiles(
                    [a / b for a, b in zip(of_arm, times[default], strict=True)]
                ),
                "decided": _is_decided(of_arm, times[default], len(arms) - 1),
            }
            for arm, of_arm in times.items()
        ]
        after_round(figures)
    return figures


def table(figures: dict[str, Any]) -> str:
    """Returns a row per setting, and a recommendation."""
    lines = [
        f"{figures['name']}: {figures['parameters']} parameters, {figures['units']} units; "
        f"{figures['rounds_taken']} rounds of {figures['steps']} steps",
        f"{'setting':48} {'step ms':>8}  over the first [p25, p75]",
    ]
    for arm in figures["arms"]:
        ratio = arm["over_default"]
        lines.append(
            f"{arm['name']:48} {arm['step_ms']['median']:8.4g}  {ratio['median']:.2f} "
            f"[{ratio['p25']:.2f}, {ratio['p75']:.2f}]"
        )
    lines.append(
        "Without reshard_after_forward a rank holds all parameters from forward to backward."
    )
    default, *ours = (arm for arm in figures["arms"] if not arm["name"].startswith("torch"))
    decided = [arm for arm in ours if arm["decided"]]
    verdict = f"keep {default['name']} (no setting is reliably faster)"
    if decided:
        best = min(decided, key=lambda arm: arm["over_default"]["median"])
        verdict = f"{best['name']}: {1 - best['over_default']['median']:.1%} less per step"
    return "\n".join([*lines, f"recommended: {verdict}"]) + "\n"


def run(given: argparse.Namespace) -> None:
    """Runs `brigade bench --units` on this rank."""
    factory = bench.find_factory(given.factory)
    conditions = bench.set_up(bench.start(given.backend))
    with bench.progress("rounds") as show:

        def after_round(figures: dict[str, Any]) -> None:
            bench.write(given.json, {"kind": "sharded", "set_up": conditions, "models": [figures]})
            show(figures["rounds_taken"], figures["rounds"])

        figures = measure(factory, given.units, given.rounds, given.steps, after_round)
    if dist.get_rank() == 0:
        print(table(figures), end="", flush=True)
    dist.destroy_process_group()
