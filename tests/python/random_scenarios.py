"""Random training programs whose gradients are known exactly, drawn from a seed.

Each step of a program mixes what people do between two optimizer steps: other collectives in
backward, a second wrapper in the same backward, a frozen one, forwards that ranks call unequally
often, forwards under no_sync in any order, parameters left out, an exception on one rank.
"""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import nn

from exact_training import SumOverRanks

MODES = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}
ORDERS = ("s", "s", "sl", "ls", "lsl", "sn", "ns", "ss", "sls")
STEPS = 7


@dataclasses.dataclass
class Step:
    """One reduced iteration, or one that fails.

    Attributes:
        orders: By rank, the forwards whose losses have one backward: synchronised (s), under
            no_sync (l), or without gradients and no part of it (n).
        local_steps: Backwards under no_sync before.
        with_collective: A collective of the backward lies before the first parameter's gradient.
        second: Another wrapper's part: none, same_backward or frozen.
        judged: Ranks whose loss goes through the frozen wrapper.
        extra_forwards: By rank and before, between and behind, forwards without a backward.
        left_out: By rank, parameters that no forward of the step uses.
        failing: The rank that raises, or None.
        fails_at: The parameter at whose gradient it raises; -1 is before any.
        set_to_none: How gradients are cleared before.
    """

    orders: list[str]
    local_steps: int
    with_collective: bool
    second: str
    judged: list[int]
    extra_forwards: list[tuple[int, int, int]]
    left_out: list[set[int]]
    failing: int | None
    fails_at: int
    set_to_none: bool


@dataclasses.dataclass
class Scenario:
    seed: int
    mode: str
    sizes: list[int]
    frozen: set[int]
    options: dict[str, object]
    hook: bool
    steps: list[Step]


def draw_scenario(seed: int, world_size: int) -> Scenario:
    draw = random.Random(seed)
    mode = draw.choice(list(MODES))
    sizes = [draw.randint(1, 6) for _ in range(draw.randint(2, 6))]
    frozen = {i for i in range(1, len(sizes)) if draw.random() < 0.15}
    options = {
        **MODES[mode],
        "gradient_as_bucket_view": draw.random() < 0.5,
        "bucket_cap_mb": draw.choice([1e-6, 3e-5, 25]),
    }
    steps = [_draw_step(draw, mode, sizes, frozen, world_size) for _ in range(STEPS)]
    return Scenario(seed, mode, sizes, frozen, options, draw.random() < 0.3, steps)


def _draw_step(draw, mode, sizes, frozen, world_size) -> Step:
    ranks = range(world_size)
    trained = [i for i in range(len(sizes)) if i not in frozen]
    left_out = [set() for _ in ranks]
    if mode == "find_unused" and draw.random() < 0.7:
        # The first parameter lies behind other collectives, where all ranks use it.
        left_out = [{i for i in trained[1:] if draw.random() < 0.4} for _ in ranks]
    failing = draw.randrange(world_size) if draw.random() < 0.25 else None
    with_collective = failing is None and draw.random() < 0.4
    second = "none" if failing is not None else draw.choice(["none", "same_backward", "frozen"])
    order = draw.choice(ORDERS)
    orders = [order for _ in ranks]
    if with_collective and len(order.replace("n", "")) > 1:
        # It runs several times in a backward; what is unused on one rank only has no one
        # place among them.
        left_out = [left_out[0] for _ in ranks]
    if not with_collective and draw.random() < 0.3:
        orders = ["s" * draw.randint(1, 3) for _ in ranks]
    extra = [(0, 0, 0) for _ in ranks]
    if draw.random() < 0.4:
        extra = [tuple(draw.choice((0, 0, 1, 2)) for _ in range(3)) for _ in ranks]
    places = [-1] + [i for i in trained if failing is None or i not in left_out[failing]]
    fails_at = draw.choice(places)
    return Step(
        orders=orders,
        local_steps=draw.choice((0, 0, 0, 1, 2)),
        with_collective=with_collective,
        second=second,
        judged=[rank for rank in ranks if draw.random() < 0.5],
        extra_forwards=extra,
        left_out=left_out,
        failing=failing,
        fails_at=fails_at,
        set_to_none=draw.random() < 0.7,
    )


class Parts(nn.Module):
    """Its gradients are the weights it is called with; the first parameter's comes last."""

    def __init__(self, sizes: list[int], frozen: set[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            nn.Parameter(torch.ones(size), requires_grad=i not in frozen)
            for i, size in enumerate(sizes)
        )
        self.raises = None  # before any parameter's gradient

    def forward(self, weights, with_collective):
        total = (self.parts[0] * weights[0]).sum()
        if with_collective:
            total = SumOverRanks.apply(total)
        for part, weight in list(zip(self.parts, weights, strict=True))[1:]:
            if weight is not None:
                total = total + (part * weight).sum()
        if self.raises is not None:
            total.register_hook(self.raises)  # behind the output, which backward reaches first
            total = total * 1
        return total


class Doubling(nn.Module):
    """The sum of its two parameters, ones, times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x * self.a + x * self.b).sum()


def weights_of(scenario: Scenario, step: Step, rank: int, number: int):
    """Others for each rank, forward, parameter and element; averages over 2 and 3 are exact."""
    return [
        None
        if i in step.left_out[rank]
        else 12.0 * (torch.arange(size) + 7 * i + 5 * number + 100 * rank + 1)
        for i, size in enumerate(scenario.sizes)
    ]
