"""What a reducer costs per parameter and step: brigade's and torch's own, interleaved.

    PYTHONPATH=build/release/python .venv/bin/python benchmarks/against_torch.py [--rounds N]

One process, a world of 1 over Gloo. The model is a chain of addcmul over parameters of
4 elements, so that nearly all of a step is overhead. In each round every contender
takes its turn in another order; the cost is the median over rounds of the difference to
local training in the same round, divided by the number of parameters. `control` is a second
copy of local training: what it shows is noise.

Columns: microseconds per parameter and step, [25th, 75th] percentile, and brigade's
median over torch's.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import brigade

from turns import CLASSES, DDP_MODES, over, quartiles, take_turns

WARM_UP_STEPS = 5


class Chain(nn.Module):
    """y = x; y = y + p * x for each parameter p."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for parameter in self.parameters_:
            y = torch.addcmul(y, parameter, x)
        return y


def backward_seconds(model: nn.Module, x: torch.Tensor) -> float:
    """Seconds from calling forward to the end of backward."""
    for parameter in model.parameters():
        parameter.grad = None
    begin = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - begin


def timed(contenders: dict, x: torch.Tensor) -> dict:
    return {key: partial(backward_seconds, model, x) for key, model in contenders.items()}


def measure_steps(count: int, rounds: int) -> None:
    """Prints the overhead of each mode at `count` parameters."""
    x = torch.ones(4)
    contenders: dict[object, nn.Module] = {"local": Chain(count), "control": Chain(count)}
    for mode, options in DDP_MODES.items():
        for name, wrapper in CLASSES.items():
            contenders[mode, name] = wrapper(Chain(count), **options)
    gc.collect()
    gc.disable()
    seconds = take_turns(timed(contenders, x), rounds, WARM_UP_STEPS)
    gc.enable()
    control = quartiles(over(seconds["control"], seconds["local"]), count * 1e-6, 2)
    print(f"\n{count} parameters, {rounds} rounds; control {control}")
    print(f"{'mode':14}{'brigade':>24}{'torch':>24}{'ratio':>8}")
    for mode in DDP_MODES:
        extra = [over(seconds[mode, name], seconds["local"]) for name in CLASSES]
        ours, theirs = (quartiles(times, count * 1e-6, 2) for times in extra)
        ratio = statistics.median(extra[0]) / statistics.median(extra[1])
        print(f"{mode:14}{ours:>24}{theirs:>24}{ratio:>8.3f}")


def measure_construction(count: int, rounds: int) -> None:
    """Prints what making a reducer over one bucket costs, and a whole wrapper.

    Of one module with all parameters, and of layers with two each, where a garbage
    collection has just emptied the caches.
    """

    def seconds_to_make(make_module: Callable, make: Callable) -> float:
        module = make_module()
        gc.collect()
        begin = time.perf_counter()
        made = make(module)
        seconds = time.perf_counter() - begin
        del made
        return seconds

    def make_reducer(reducer: type, module: nn.Module) -> object:
        plan = [list(range(count))]
        return reducer(list(module.parameters()), plan, [1 << 40], dist.group.WORLD)

    def make_layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count // 2)))

    steps = {}
    for name, reducer in {"brigade": brigade.Reducer, "torch": dist.Reducer}.items():
        chain = partial(Chain, count)
        steps["reducer", name] = partial(seconds_to_make, chain, partial(make_reducer, reducer))
        steps["wrapper", name] = partial(seconds_to_make, chain, CLASSES[name])
        steps["of layers", name] = partial(seconds_to_make, make_layers, CLASSES[name])
    times = take_turns(steps, rounds, warm_up=0)
    print(f"\nconstruction, {count} parameters in one bucket, us per parameter (median)")
    for what in ("reducer", "wrapper", "of layers"):
        ours, theirs = (statistics.median(times[what, name]) / count * 1e6 for name in CLASSES)
        print(f"{what:14}{ours:>24.2f}{theirs:>24.2f}{ours / theirs:>8.3f}")


def measure_hook(buckets: int, rounds: int) -> None:
    """Prints what a Python comm hook adds per bucket."""

    def noop(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    x = torch.ones(4)
    # 16 bytes per parameter: one per bucket.
    models = {
        (name, hooked): wrapper(Chain(buckets), bucket_cap_mb_list=[16 / 2**20])
        for name, wrapper in CLASSES.items()
        for hooked in (False, True)
    }
    for (_, hooked), model in models.items():
        if hooked:
            model.register_comm_hook(None, noop)
    seconds = take_turns(timed({**models, "local": Chain(buckets)}, x), rounds, WARM_UP_STEPS)
    print(f"\n{buckets} buckets of one parameter, us per bucket over local training (median)")
    for hooked, label in ((False, "no hook"), (True, "Python hook")):
        ours, theirs = (
            statistics.median(over(seconds[name, hooked], seconds["local"])) / buckets * 1e6
            for name in CLASSES
        )
        print(f"{label:14}{ours:>24.2f}{theirs:>24.2f}{ours / theirs:>8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it works")
    arguments = parser.parse_args()
    rounds = 4 if arguments.quick else arguments.rounds
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        load = os.getloadavg()[0]
        print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {load:.1f}")
        for count in (1000, 5000):
            measure_steps(count, rounds)
        measure_hook(200, rounds)
        measure_construction(8000, 2 if arguments.quick else 5)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
