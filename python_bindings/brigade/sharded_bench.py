"""Times sharded training steps with several settings: `brigade bench FACTORY --units CLASS`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from brigade import bench
from brigade.distributed_data_parallel import DistributedDataParallel
from brigade.fully_shard import fully_shard

Workload = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]
Wrap = Callable[[nn.Module, list[nn.Module]], nn.Module]


def _sharded(shard: Callable[..., Any], units_at_once: int, **settings: Any) -> Wrap:
    def wrap(module: nn.Module, units: list[nn.Module]) -> nn.Module:
        for begin in range(0, len(units), units_at_once):
            together = units[begin : begin + units_at_once]
            shard(together if len(together) > 1 else together[0], **settings)
        shard(module)
        return module

    return wrap


def arms_of(num_units: int) -> dict[str, Wrap]:
    """Returns the settings to compare, by name; the first is the default."""
    arms: dict[str, Wrap] = {}
    for units_at_once in (1, 2, 4):
        if units_at_once > 1 and num_units < 2 * units_at_once:
            break
        for reshard in (True, False):
            for depth in (1, 2):
                if units_at_once > 1 and depth > 1:
                    continue
                name = "reshard_after_forward=" + str(reshard)
                name += f", prefetch_depth={depth}" if depth > 1 else ""
                name += f", {units_at_once} modules per unit" if units_at_once > 1 else ""
                arms[name] = _sharded(
                    fully_shard,
                    units_at_once,
                    reshard_after_forward=reshard,
                    prefetch_depth=depth,
                )
    arms["DistributedDataParallel"] = lambda module, units: DistributedDataParallel(module)
    for reshard in (True, False):
        arms[f"torch's fully_shard, {reshard}"] = _sharded(
            torch.distributed.fsdp.fully_shard, 1, reshard_after_forward=reshard
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


def measure(
    factory: Callable[[], Workload],
    unit_class: str,
    rounds: int,
    steps: int,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Times each setting in turns; collective. Each has a model of its own by `factory`.

    Raises:
        ValueError: The model has no module of that class, or there are fewer than 2 rounds.
    """
    if rounds < 2 or steps < 1:
        raise ValueError(f"bench: expected 2 rounds and 1 step or more, found {rounds}, {steps}")

    def units_of(module: nn.Module) -> list[nn.Module]:
        return [child for child in module.modules() if type(child).__name__ == unit_class]

    module, loss = factory()[:2]
    if not (units := units_of(module)):
        classes = ", ".join(sorted({type(child).__name__ for child in module.modules()}))
        raise ValueError(
            f"--units: expected a class of the model's modules, found {unit_class!r}.\n"
            f"The model has {classes}."
        )
    name, trained = type(module).__name__, sum(p.numel() for p in module.parameters())
    arms, models = arms_of(len(units)), {}
    for arm, wrap in arms.items():
        module, loss = factory()[:2]
        models[arm] = wrap(module, units_of(module)), loss
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    order = list(arms)
    for done in range(rounds + 1):  # the first one warms up
        for arm in order:
            _step_seconds(*models[arm])
            found = torch.tensor([_step_seconds(*models[arm]) for _ in range(steps)])
            if torch.accelerator.is_available():
                found = found.to(torch.accelerator.current_accelerator())
            dist.all_reduce(found, dist.ReduceOp.MAX)
            if done > 0:
                times[arm].append(1e3 * found.median().item())
        order.reverse()
        show(done, rounds)
    first = times[next(iter(arms))]
    return {
        "name": name,
        "parameters": trained,
        "units": len(units),
        "rounds": rounds,
        "steps": steps,
        "arms": [
            {
                "name": arm,
                "rounds_ms": times[arm],
                "step_ms": bench.quartiles(times[arm]),
                "over_default": bench.quartiles(
                    [a / b for a, b in zip(times[arm], first, strict=True)]
                ),
            }
            for arm in arms
        ],
    }


def table(figures: dict[str, Any]) -> str:
    """Returns a row per setting, and a recommendation."""
    lines = [
        f"{figures['name']}: {figures['parameters']} parameters, {figures['units']} units; "
        f"{figures['rounds']} rounds of {figures['steps']} steps",
        f"{'setting':46} {'step ms':>8}  over the first [p25, p75]",
    ]
    for arm in figures["arms"]:
        ratio = arm["over_default"]
        lines.append(
            f"{arm['name']:46} {arm['step_ms']['median']:8.4g}  {ratio['median']:.2f} "
            f"[{ratio['p25']:.2f}, {ratio['p75']:.2f}]"
        )
    ours = [arm for arm in figures["arms"] if not arm["name"].startswith("torch")]
    best = min(ours, key=lambda arm: arm["over_default"]["median"])
    if best is ours[0] or best["over_default"]["p75"] >= 1:
        verdict = f"keep {ours[0]['name']}: nothing is faster in three of four rounds"
    else:
        verdict = f"{best['name']}: {1 - best['over_default']['median']:.1%} less per step"
    lines.append(
        "Without reshard_after_forward a rank holds all parameters from forward to backward,"
    )
    lines.append("with DistributedDataParallel also gradients and optimizer states, at all times.")
    return "\n".join([*lines, f"recommended: {verdict}"]) + "\n"


def run(given: argparse.Namespace) -> None:
    """Runs `brigade bench --units` on this rank."""
    factory = bench.find_factory(given.factory)
    bench.start(given.backend)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    conditions = bench.set_up(device)
    with bench.progress("rounds") as show:
        figures = measure(factory, given.units, given.rounds, given.steps, show)
    bench.write(given.json, {"kind": "sharded", "set_up": conditions, "models": [figures]})
    if dist.get_rank() == 0:
        print("".join(f"{name:<9} {value}\n" for name, value in conditions.items()), end="")
        print(table(figures), end="", flush=True)
    dist.destroy_process_group()
