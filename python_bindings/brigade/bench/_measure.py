"""Times a workload's steps under several bucket sizes; knows no statistics.

All arms, and the same steps without a wrapper, take turns in one run, in
alternating order, so that a slow minute of the machine hits all of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from brigade.bench._gradient_check import GradientCheck
from brigade.bench._ranks import Ranks
from brigade.bench._workload import DEFAULT_ARM, Arm, Workload
from brigade.distributed_data_parallel import DistributedDataParallel

# Buckets are rebuilt behind the first step, on a static graph behind the second.
_STEPS_UNTIL_REBUILT = 3


@dataclass
class Track:
    """Arms that give the same buckets, and what was seen of them.

    Times are those of the slowest rank, by round and then by step.
    """

    arms: list[Arm]
    bucket_bytes: list[int]
    rounds_ms: list[list[float]] = field(default_factory=list)
    alone_ms: list[float] = field(default_factory=list)  # all-reduces alone, by round
    sums_right: bool = False  # on all ranks


@dataclass
class Samples:
    """All that was measured; the first track has the default's buckets."""

    name: str
    parameters: int
    gradient_bytes: int
    local_ms: list[list[float]]  # steps without a wrapper, by round
    tracks: list[Track]


def sweep(
    workload: Workload,
    arms: Sequence[Arm],
    rounds: int = 8,
    steps: int = 3,
    group: dist.ProcessGroup | None = None,
    after_visit: Callable[[str], None] = lambda label: None,
) -> Samples:
    """Times steps with the default's buckets and with those of each arm.

    Collective. The module's parameters keep their values and end without
    gradients; its buffers may change, as in training.

    Args:
        workload: What is timed.
        arms: What is tried besides the default. Those that give the same buckets
            are measured once.
        rounds: Visits to each arm.
        steps: Timed in each visit.
        group: Default: the default group.
        after_visit: Called with an arm's label, at most
            (arms + 2) * (rounds + 1) times.

    Raises:
        ValueError: `rounds` or `steps` is below 1, or the loss is not one number.
    """
    if rounds < 1 or steps < 1:
        raise ValueError(
            f"brigade.bench: rounds and steps must be 1 or more, got {rounds} and {steps}.\n"
            "Leave them out."
        )
    group = dist.group.WORLD if group is None else group
    parameters = workload.parameters()
    ranks = Ranks(group, parameters[0].device)
    tracks: list[Track] = []
    for arm in [DEFAULT_ARM, *arms]:
        _add_arm(tracks, arm, workload, ranks)
        after_visit(arm.label)

    local = Track(arms=[], bucket_bytes=[])
    for round_ in range(rounds):
        order = [local, *tracks]
        for track in order if round_ % 2 == 0 else reversed(order):
            _visit(track, workload, ranks, steps)
            after_visit(track.arms[0].label if track.arms else "no wrapper")
    workload.module.zero_grad(set_to_none=True)

    for track in [local, *tracks]:
        track.rounds_ms = [ranks.slowest(times) for times in track.rounds_ms]
        track.alone_ms = ranks.slowest(track.alone_ms)
    return Samples(
        name=workload.title(),
        parameters=len(parameters),
        gradient_bytes=sum(p.nbytes for p in parameters),
        local_ms=local.rounds_ms,
        tracks=tracks,
    )


def _add_arm(tracks: list[Track], arm: Arm, workload: Workload, ranks: Ranks) -> None:
    """Looks at the buckets that the arm gives, and at what arrives in `.grad`."""
    with _wrapped(workload, arm, ranks, compare_ranks=not tracks) as model:
        _warm_up(model, workload, ranks)
        buckets = _bucket_bytes(model, workload.parameters())
        for track in tracks:
            if track.bucket_bytes == buckets:
                track.arms.append(arm)
                return
        track = Track(arms=[arm], bucket_bytes=buckets)
        with GradientCheck(workload.parameters(), ranks) as check:
            _timed_step(model, workload, ranks)
            track.sums_right = check.gradients_are_averages()
        tracks.append(track)


def _visit(track: Track, workload: Workload, ranks: Ranks, steps: int) -> None:
    if not track.arms:
        _timed_step(workload.module, workload, ranks)  # touches the memory
        track.rounds_ms.append(
            [_timed_step(workload.module, workload, ranks) for _ in range(steps)]
        )
        return
    with _wrapped(workload, track.arms[0], ranks) as model:
        _warm_up(model, workload, ranks)
        track.rounds_ms.append([_timed_step(model, workload, ranks) for _ in range(steps)])
    track.alone_ms.append(_all_reduce_alone(track.bucket_bytes, workload, ranks))


@contextmanager
def _wrapped(
    workload: Workload, arm: Arm, ranks: Ranks, compare_ranks: bool = False
) -> Iterator[torch.nn.Module]:
    """The module in a wrapper that leaves no trace on it."""
    model = DistributedDataParallel(
        workload.module,
        process_group=ranks.group,
        init_sync=compare_ranks,
        **{**workload.options, **arm.options},
    )
    try:
        yield model
    finally:
        model.reducer._remove_autograd_hooks()
        workload.module.zero_grad(set_to_none=True)  # lets go of the buckets
        del model
        gc.collect()


def _warm_up(model: torch.nn.Module, workload: Workload, ranks: Ranks) -> None:
    for _ in range(_STEPS_UNTIL_REBUILT):
        _timed_step(model, workload, ranks)


def _timed_step(model: torch.nn.Module, workload: Workload, ranks: Ranks) -> float:
    """Milliseconds of one forward and backward."""
    workload.module.zero_grad(set_to_none=True)
    ranks.meet()
    begin = time.perf_counter()
    loss = workload.loss(model)
    _require_loss(loss)
    loss.backward()
    ranks.synchronize()
    return 1e3 * (time.perf_counter() - begin)


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


def _bucket_bytes(model: DistributedDataParallel, parameters: list[torch.Tensor]) -> list[int]:
    """In launch order, after the one rebuild."""
    return [sum(parameters[i].nbytes for i in bucket) for bucket in model.bucket_plan()]


def _all_reduce_alone(bucket_bytes: list[int], workload: Workload, ranks: Ranks) -> float:
    """Milliseconds that the buckets' all-reduces take, one after the other."""
    like = workload.parameters()[0]
    buffers = [
        torch.zeros(size // like.element_size(), dtype=like.dtype, device=like.device)
        for size in bucket_bytes
    ]
    ranks.meet()
    begin = time.perf_counter()
    for buffer in buffers:
        dist.all_reduce(buffer, group=ranks.group)
    ranks.synchronize()
    return 1e3 * (time.perf_counter() - begin)
