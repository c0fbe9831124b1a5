"""Models, options and schedules drawn from a seed, to train with both classes."""

from __future__ import annotations

import dataclasses
import random
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
ROWS = 9
BATCH = 4
HIDDEN = 3000  # weights of 72 KB in float32: large ones take memory of their bucket over

# What a step gets: rows of numbers, rows of a table, and which way to go.
Batch = tuple[torch.Tensor, torch.Tensor, int]


@dataclasses.dataclass
class Case:
    """One way to train one model."""

    seed: int
    dtype: torch.dtype
    options: dict[str, Any]
    set_to_none: bool
    steps: int
    hook: str | None
    # Steps whose backward only accumulates.
    unsynchronised: frozenset[int]
    # Steps before which there is a forward without gradients.
    evaluated: frozenset[int]
    two_losses: bool
    # None: the same way on every rank in every step.
    ways: str | None

    def way(self, rank: int, step: int) -> int:
        """Which branch is taken, from 0 on."""
        if self.ways is None:
            return self.seed
        if self.ways == "by step":
            return self.seed + step
        if self.ways == "by rank":
            return self.seed + rank
        return random.Random(f"{self.seed} {rank} {step}").randrange(100)


def draw_case(seed: int) -> Case:
    """The case of a seed; the same on every rank and machine."""
    draw = random.Random(f"case {seed}")
    dtype = draw.choice([torch.float32] * 3 + [torch.float64, torch.bfloat16, torch.complex64])
    mode = draw.choice(["plain", "plain", "unused", "unused", "static"])
    options: dict[str, Any] = {
        "gradient_as_bucket_view": draw.random() < 0.5,
        "broadcast_buffers": draw.random() < 0.7,
        "find_unused_parameters": mode == "unused",
        "static_graph": mode == "static",
    }
    caps = draw.choice(["default", "one", "list"])
    if caps == "one":
        options["bucket_cap_mb"] = draw.choice([1e-5, 1e-4, 3e-4, 1])
    elif caps == "list":
        options["bucket_cap_mb_list"] = [
            draw.choice([1e-4, 3e-4, 1e-3, 1]) for _ in range(draw.randint(1, 3))
        ]
    steps = draw.randint(3, 6)
    hooks = [None, None, None, "allreduce"]
    if dtype is torch.float32:
        hooks += ["fp16", "builtin", "builtin fp16"]
    accumulates = mode != "static" and draw.random() < 0.4
    return Case(
        seed=seed,
        dtype=dtype,
        options=options,
        set_to_none=draw.random() < 0.6,
        steps=steps,
        hook=draw.choice(hooks),
        unsynchronised=frozenset(
            step for step in range(steps) if accumulates and draw.random() < 0.5
        ),
        evaluated=frozenset(step for step in range(steps) if draw.random() < 0.2),
        two_losses=mode == "plain" and draw.random() < 0.25,
        ways=draw.choice([None, "by step", "by rank", "freely"]) if mode == "unused" else None,
    )


def draw_batches(case: Case, rank: int) -> list[Batch]:
    """Other numbers on every rank and in every step."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    return [
        (
            torch.randn(BATCH, WIDTH, generator=generator).to(case.dtype),
            torch.randint(ROWS, (BATCH,), generator=generator),
            case.way(rank, step),
        )
        for step in range(case.steps)
    ]


class RandomModel(nn.Module):
    """A chain of blocks from rows to rows, of some of the kinds below."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        draw = random.Random(f"model {case.seed}")
        self.has_branches = case.options["find_unused_parameters"] or case.options["static_graph"]
        reentrant = case.options["static_graph"] and draw.random() < 0.5
        blocks: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
        for _ in range(draw.randint(1, 6)):
            block = self._draw_block(draw, case, blocks)
            if draw.random() < 0.25 and not isinstance(block, Norm):
                block = Checkpointed(block, reentrant)
            blocks.append(block)
        self.blocks = nn.ModuleList(blocks)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # buffers stay real
            self.to(case.dtype)
        trainable = list(self.parameters())
        for parameter in trainable[1:]:
            parameter.requires_grad_(draw.random() < 0.95)
        self.nest = draw.choice(["tensor", "tuple", "dict"])

    def _draw_block(self, draw: random.Random, case: Case, blocks: list[nn.Module]) -> nn.Module:
        kinds = ["linear", "wide", "scale", "empty", "strided", "repeat", "tied"]
        if not case.dtype.is_complex:
            kinds += ["norm", "conv", "embedding"]
        if case.dtype in (torch.float32, torch.float64) and "fp16" not in (case.hook or ""):
            kinds += ["sparse"]
        if self.has_branches:
            kinds += ["branches"] * 4 + ["never"]
        kind = draw.choice(kinds)
        if kind == "linear":
            return nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7)
        if kind == "wide":
            return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
        if kind == "norm":
            return Norm(draw.choice([nn.BatchNorm1d, nn.LayerNorm])(WIDTH))
        if kind == "conv":
            return Convolution(draw.randint(1, 3), draw.random() < 0.5)
        if kind in ("embedding", "sparse"):
            return Lookup(kind == "sparse")
        if kind == "branches":
            return Branches(draw.randint(2, 3))
        if kind == "repeat":
            return Repeat(draw.choice(blocks), draw.randint(1, 2))
        if kind == "tied":
            return Tied(blocks[0])
        return {"scale": Scale, "empty": Empty, "strided": Strided, "never": Never}[kind]()

    def forward(self, batch: Batch) -> Any:
        x, rows, way = batch
        for block in self.blocks:
            x = run(block, x, rows, way)
        if self.nest == "tuple":
            return x, (x[:, 0] * 2, None)
        if self.nest == "dict":
            return {"rows": x, "more": [x.sum(), "text"]}
        return x


class TwoModels(nn.Module):
    """Two outputs that share nothing: each may have a backward of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.models = nn.ModuleList(
            RandomModel(dataclasses.replace(case, seed=seed)) for seed in (case.seed, -case.seed)
        )

    def forward(self, batch: Batch) -> list[Any]:
        return [model(batch) for model in self.models]


def make_model(case: Case) -> nn.Module:
    return TwoModels(case) if case.two_losses else RandomModel(case)


def run(block: nn.Module, x: torch.Tensor, rows: torch.Tensor, way: int) -> torch.Tensor:
    """What a block makes of x; the values stay small."""
    if isinstance(block, Block):
        return block(x, rows, way)
    return torch.tanh(block(x))


class Block(nn.Module):
    """Takes x, rows of a table, and the way to go."""


class Scale(Block):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(WIDTH))
        self.all = nn.Parameter(torch.randn(()))

    def forward(self, x, rows, way):
        return torch.tanh(x * self.by * self.all)


class Empty(Block):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.randn(0, 3))

    def forward(self, x, rows, way):
        return x + self.nothing.sum()


class Strided(Block):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def forward(self, x, rows, way):
        return torch.tanh(x @ self.weight)


class Norm(Block):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x, rows, way):
        return self.norm(x)


class Convolution(Block):
    def __init__(self, channels: int, channels_last: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels, (2, 3), padding=(0, 1))
        if channels_last:
            self.conv.to(memory_format=torch.channels_last)

    def forward(self, x, rows, way):
        image = torch.stack([x, x * x], dim=1).unsqueeze(1)
        return torch.tanh(self.conv(image).mean(1).squeeze(1))


class Lookup(Block):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse)

    def forward(self, x, rows, way):
        # Not x + table(rows): torch's class would scale x's gradient as well.
        return torch.tanh(x + 0.5 * self.table(rows))


class Branches(Block):
    """Uses one of its layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x, rows, way):
        return torch.tanh(self.ways[way % len(self.ways)](x))


class Never(Block):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 3)

    def forward(self, x, rows, way):
        return x


class Repeat(Block):
    """An earlier block once more, or twice."""

    def __init__(self, block: nn.Module, times: int) -> None:
        super().__init__()
        self.block, self.times = block, times

    def forward(self, x, rows, way):
        for _ in range(self.times):
            x = run(self.block, x, rows, way)
        return x


class Tied(Block):
    """A layer of its own with the first layer's weight."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.weight = first.weight

    def forward(self, x, rows, way):
        return torch.tanh(self.layer(x))


class Checkpointed(Block):
    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x, rows, way):
        return checkpoint(run, self.block, x, rows, way, use_reentrant=self.reentrant)
