"""What a sweep's times say: medians with quartiles, and paired differences.

Pure functions of what was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from brigade.bench._measure import Samples, Track

# Of recommending a size that is no better, with all sizes tried.
_CHANCE = 0.05


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles: what a shared machine's times are told by."""

    p25: float
    median: float
    p75: float


@dataclass(frozen=True)
class ArmSummary:
    """One row: a plan, and what steps with it take, in ms."""

    label: str  # of all arms that give these buckets
    options: Mapping[str, Any]  # of DistributedDataParallel, for the first of them
    bucket_bytes: Sequence[int]
    step_ms: Quartiles
    exposed_ms: Quartiles  # more than a step of the same round without a wrapper
    alone_ms: float  # all-reduces of such buckets, with nothing else to do
    sums_right: bool

    @property
    def overlap(self) -> float:
        """The share of `alone_ms` that backward hides.

        Negative when packing, latency and waiting for the slower rank cost more
        than it hides.
        """
        return 1 - self.exposed_ms.median / self.alone_ms


@dataclass(frozen=True)
class Recommendation:
    """The fastest arm beside the default, compared with it round by round."""

    arm: ArmSummary
    saved_ms: Quartiles  # per step, of the default's
    saved_share: float  # median, of the default's median
    rounds_faster: int
    rounds: int
    decided: bool  # chance alone is an unlikely explanation


@dataclass(frozen=True)
class Summary:
    """A sweep, ready to be shown; the first arm is the default."""

    name: str
    parameters: int
    gradient_bytes: int
    local_ms: Quartiles
    arms: Sequence[ArmSummary]
    best: Recommendation | None  # None: every arm gives the default's buckets


def quantile(samples: Sequence[float], q: float) -> float:
    """Between two samples, linearly."""
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def quartiles(samples: Sequence[float]) -> Quartiles:
    return Quartiles(*(quantile(samples, q) for q in (0.25, 0.5, 0.75)))


def summarize(samples: Samples) -> Summary:
    """Medians and paired differences of what was measured."""
    arms = [_summary_of(track, samples.local_ms) for track in samples.tracks]
    return Summary(
        name=samples.name,
        parameters=samples.parameters,
        gradient_bytes=samples.gradient_bytes,
        local_ms=quartiles(_flat(samples.local_ms)),
        arms=arms,
        best=_best(samples.tracks, arms),
    )


def _summary_of(track: Track, local_ms: Sequence[Sequence[float]]) -> ArmSummary:
    exposed = [
        step - statistics.median(local)
        for steps, local in zip(track.rounds_ms, local_ms, strict=True)
        for step in steps
    ]
    return ArmSummary(
        label=", ".join(arm.label for arm in track.arms),
        options=track.arms[0].options,
        bucket_bytes=track.bucket_bytes,
        step_ms=quartiles(_flat(track.rounds_ms)),
        exposed_ms=quartiles(exposed),
        alone_ms=statistics.median(track.alone_ms),
        sums_right=track.sums_right,
    )


def _best(tracks: Sequence[Track], arms: Sequence[ArmSummary]) -> Recommendation | None:
    default = [statistics.median(steps) for steps in tracks[0].rounds_ms]
    candidates = [
        _compare(arm, track, default, len(tracks) - 1)
        for arm, track in zip(arms[1:], tracks[1:], strict=True)
    ]
    return max(candidates, key=lambda found: found.saved_ms.median, default=None)


def _compare(
    arm: ArmSummary, track: Track, default: Sequence[float], num_candidates: int
) -> Recommendation:
    saved = [
        before - statistics.median(steps)
        for before, steps in zip(default, track.rounds_ms, strict=True)
    ]
    faster = sum(difference > 0 for difference in saved)
    return Recommendation(
        arm=arm,
        saved_ms=quartiles(saved),
        saved_share=quartiles(saved).median / statistics.median(default),
        rounds_faster=faster,
        rounds=len(saved),
        decided=num_candidates * chance_of(faster, len(saved)) <= _CHANCE,
    )


def chance_of(heads: int, throws: int) -> float:
    """That a fair coin shows heads so many times or more often."""
    return sum(math.comb(throws, k) for k in range(heads, throws + 1)) / 2**throws


def _flat(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [value for steps in rounds for value in steps]
