"""How a sweep is shown: as a table to read, and as JSON.

Pure functions; sizes are in powers of ten, as links are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from brigade.bench._statistics import ArmSummary, Quartiles, Recommendation, Summary, quantile


def report(summary: Summary) -> str:
    """The table, with what it says in one sentence below."""
    local = summary.local_ms
    width = max(10, *(len(arm.label) for arm in summary.arms))
    lines = [
        f"{summary.name}: {summary.parameters} gradients, "
        f"{readable_bytes(summary.gradient_bytes)}; step without a wrapper "
        f"{local.median:.1f} ms [{local.p25:.1f}, {local.p75:.1f}]",
        f"{'cap':<{width}}  {'buckets':>7}  {'min   median      max':>26}  {'step ms':>8} "
        f"{'[p25, p75]':>17}  {'exposed ms':>10}  {'alone ms':>8}  {'overlap':>7}  sums",
        *(_row(arm, width) for arm in summary.arms),
        recommend(summary),
    ]
    return "\n".join(lines) + "\n"


def recommend(summary: Summary) -> str:
    """One sentence: what to set, and what it saves."""
    best = summary.best
    if best is None:
        return "recommended: the default; every size tried gives its buckets"
    if best.saved_ms.median <= 0:
        return "recommended: the default; no other size is faster"
    saved = best.saved_ms
    margin = (
        f"{saved.median:.1f} ms ({100 * best.saved_share:.1f} %) less per step than the default "
        f"[{saved.p25:.1f}, {saved.p75:.1f}], faster in {best.rounds_faster} of {best.rounds} "
        "rounds"
    )
    if best.decided:
        options = ", ".join(f"{name}={value}" for name, value in best.arm.options.items())
        return f"recommended: {options}; {margin}"
    return f"recommended: the default; {best.arm.label}: {margin}, which may be chance"


def to_json(summary: Summary, set_up: dict[str, Any] | None = None) -> dict[str, Any]:
    """The same as plain data."""
    model = {
        "name": summary.name,
        "parameters": summary.parameters,
        "gradient_bytes": summary.gradient_bytes,
        "local_ms": dataclasses.asdict(summary.local_ms),
        "arms": [_arm_json(arm) for arm in summary.arms],
        "best": None if summary.best is None else _best_json(summary.best),
        "recommendation": recommend(summary),
    }
    return {"set_up": set_up or {}, "models": [model]}


def readable_bytes(count: float) -> str:
    """18 kB, 2.36 MB, 154 MB: three digits."""
    if count < 1e3:
        return f"{count:.0f} B"
    value, unit = (count / 1e3, "kB") if count < 1e6 else (count / 1e6, "MB")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def _row(arm: ArmSummary, width: int) -> str:
    sizes = arm.bucket_bytes
    step = arm.step_ms
    spread = f"[{step.p25:.1f}, {step.p75:.1f}]"
    overlap = f"{100 * arm.overlap:.0f} %" if arm.overlap > 0 else "none"
    return (
        f"{arm.label:<{width}}  {len(sizes):>7}  {readable_bytes(min(sizes)):>8} "
        f"{readable_bytes(quantile(sizes, 0.5)):>8} {readable_bytes(max(sizes)):>8}  "
        f"{step.median:>8.1f} {spread:>17}  {arm.exposed_ms.median:>10.1f}  "
        f"{arm.alone_ms:>8.1f}  {overlap:>7}  {'right' if arm.sums_right else 'WRONG'}"
    )


def _arm_json(arm: ArmSummary) -> dict[str, Any]:
    return {
        "cap": arm.label,
        "options": dict(arm.options),
        "buckets": len(arm.bucket_bytes),
        "bucket_bytes": {
            "min": min(arm.bucket_bytes),
            "median": quantile(arm.bucket_bytes, 0.5),
            "max": max(arm.bucket_bytes),
        },
        "step_ms": _json_of(arm.step_ms),
        "exposed_ms": _json_of(arm.exposed_ms),
        "alone_ms": arm.alone_ms,
        "overlap": arm.overlap,
        "sums_verified": arm.sums_right,
    }


def _best_json(best: Recommendation) -> dict[str, Any]:
    return {
        "cap": best.arm.label,
        "options": dict(best.arm.options),
        "saved_ms": _json_of(best.saved_ms),
        "saved_share": best.saved_share,
        "rounds_faster": best.rounds_faster,
        "rounds": best.rounds,
        "decided": best.decided,
    }


def _json_of(quartiles: Quartiles) -> dict[str, float]:
    return dataclasses.asdict(quartiles)
