"""Step times of torch's DDP and brigade's over emulated links between hosts. Needs root.

    PYTHONPATH=build/release/python .venv/bin/python benchmarks/netlab/netlab.py run FILE
    ... netlab.py report FILE [--write]     prints tables, or writes docs' tables and picture

`run` takes 70 minutes; nothing else should run. FILE stores each complete cell: a second run
measures only the missing ones. --cells TEXT chooses those whose name has TEXT.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy
from matplotlib import pyplot

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from brigade import _C

import report as documents
from turns import paired, spread

FOLDER = pathlib.Path(__file__).resolve().parent
LINKS = {
    "2 hosts, 1 Gbit": ["2", "1gbit"],
    "4 hosts, 200 Mbit": ["4", "200mbit"],
    "4 hosts, 1 Gbit": ["4", "1gbit"],
    "2 hosts, 1 Gbit + 1 ms": ["2", "1gbit", "1000"],
}
MODELS = {
    "24 MB ResNet": ("resnet", 24),
    "6 MB uniform": ("uniform", 6),
    "sharded 24 MB": ("sharded", 24),
    "100 MB GPT": ("gpt", 100),
}
DEFAULT, OURS, AUTO = "torch, default", "brigade, default", "brigade, auto"
HEADER = ["cell", DEFAULT, "torch, best cap", OURS, AUTO, "bound", "auto / best cap"]
HEADER += ["auto / torch", "gain", "overlap"]
SHARDED = ["cell", "reshard", "prefetch_depth=1", "prefetch_depth=2", "torch", "alone"]

Cell = dict[str, Any]
Prediction = tuple[str, str, float, list[float]]  # cell, arm, predicted s, measured s by round


def cells() -> dict[str, Cell]:
    """Returns the cells by name; the first four have one link each."""
    return {
        f"{link}, {model}": {"link": link, "shape": shape, "megabytes": megabytes}
        for model, (shape, megabytes) in MODELS.items()
        for link in (list(LINKS)[:2] if shape == "sharded" else LINKS)
    }


def measure(cell: Cell) -> Cell:
    """Runs one rank per host; returns the figures of the cell."""
    link = LINKS[cell["link"]]
    script, file = str(FOLDER / "netlab.sh"), pathlib.Path(f"/tmp/netlab_{os.getpid()}.json")
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "eth0"}
    quiet |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(random.randint(20000, 40000))}
    ranks: list[subprocess.Popen] = []
    try:
        subprocess.run([script, "up", *link], check=True)
        for rank in range(int(link[0])):
            ranked = {"RANK": str(rank), "WORLD_SIZE": link[0], **quiet}
            command = [script, "exec", str(rank), sys.executable, str(FOLDER / "cell.py")]
            command += [json.dumps(cell), str(file)]
            ranks.append(subprocess.Popen(command, env=os.environ | ranked))
        if any([rank.wait() for rank in ranks]):
            raise RuntimeError(f"{cell}: a rank failed")
        return json.loads(file.read_text())
    finally:
        subprocess.run([script, "down"], check=True)  # ends the ranks, too
        file.unlink(missing_ok=True)


def run(file: pathlib.Path, chosen: str, seconds: float) -> None:
    data: Cell = {"kind": "netlab", "set_up": documents.machine(), "cells": {}}
    if file.exists():
        data = json.loads(file.read_text())
    wanted = {name: cell for name, cell in cells().items() if chosen in name}
    for index, (name, cell) in enumerate(wanted.items()):
        if name in data["cells"]:
            continue
        print(f"{time.strftime('%H:%M:%S')} {index + 1} of {len(wanted)}: {name}", flush=True)
        cell["load"] = os.getloadavg()[0]
        data["cells"][name] = cell | measure(cell | {"seconds": seconds})
        part = file.with_suffix(".part")
        part.write_text(json.dumps(data) + "\n")
        part.replace(file)


def rounds_of(cell: Cell) -> dict[str, list[float]]:
    """Returns the median step of each arm and round."""
    return {n: [statistics.median(r) for r in rounds] for n, rounds in cell["seconds"].items()}


def row_of(name: str, cell: Cell) -> Cell:
    """Returns the figures of a cell. Odd rounds choose torch's best cap, even ones compare it."""
    taken = rounds_of(cell)
    medians = {arm: statistics.median(rounds) for arm, rounds in taken.items()}
    caps = [arm for arm in taken if arm.startswith("torch")]
    best = min(caps, key=lambda arm: statistics.median(taken[arm][::2]))
    added_s = medians[AUTO] - medians["alone"]
    return {
        "cell": name,
        "ms": {arm: 1e3 * seconds for arm, seconds in medians.items()},
        "best": best,
        "bound_ms": 1e3 * cell["bound_s"],
        "over_best": spread(paired(taken[AUTO][1::2], taken[best][1::2])),
        "over_torch": spread(paired(taken[AUTO], taken[DEFAULT])),
        "gain": (medians[DEFAULT] - medians[AUTO]) / (medians[DEFAULT] - cell["bound_s"]),
        "overlap": 1 - added_s / medians["all-reduces of auto"],
    }


def cells_of(row: Cell) -> list[str]:
    times = [row["ms"][arm] for arm in (DEFAULT, row["best"], OURS, AUTO)] + [row["bound_ms"]]
    texts = [f"{time:.0f}" for time in times]
    texts[1] += f" ({row['best'].removeprefix('torch, ')})"
    ratios = [documents.shown(row[key]) for key in ("over_best", "over_torch")]
    return [row["cell"], *texts, *ratios, f"{row['gain']:.0%}", f"{row['overlap']:.0%}"]


def kendall_tau(predictions: list[Prediction]) -> tuple[float, int]:
    """Returns tau, and its pairs: steps of one cell that differ by more than both spreads."""
    agree = []
    for (cell, _, p, a), (other, _, q, b) in itertools.combinations(predictions, 2):
        noise_s = max(numpy.subtract(*numpy.percentile(s, [75, 25])) for s in (a, b))
        apart_s = statistics.median(a) - statistics.median(b)
        if cell == other and abs(apart_s) > noise_s:
            agree.append(float(numpy.sign((p - q) * apart_s)))
    return (statistics.fmean(agree) if agree else math.nan), len(agree)


def errors_of(predictions: list[Prediction]) -> list[str]:
    """Returns lines: each error in %, then their distribution and rank correlation."""
    lines, errors, beyond = [], [], []
    for cell, arm, predicted_s, taken in predictions:
        low, middle, high = numpy.percentile(taken, [25, 50, 75])
        errors.append(100 * (predicted_s / middle - 1))
        beyond.append(100 * max(predicted_s - high, low - predicted_s, 0) / middle)
        lines.append(
            f"{cell:40} {arm:32} {1e3 * predicted_s:8.1f} ms, measured {1e3 * middle:8.1f} "
            f"[{1e3 * low:.1f}, {1e3 * high:.1f}] {errors[-1]:+6.1f} %"
        )
    quantiles = [f"{q:.1f}" for q in numpy.percentile(numpy.abs(errors), [10, 50, 75, 90, 100])]
    tau, pairs = kendall_tau(predictions)
    lines += [
        f"absolute error in %, quantiles 10, 50, 75, 90, 100: {', '.join(quantiles)}",
        f"mean error {statistics.fmean(errors):+.1f} %; "
        f"beyond the quartiles of the measured steps at most {max(beyond):.1f} %",
        f"Kendall tau {tau:.2f} over {pairs} pairs that differ by more than their quartiles",
    ]
    return lines


def simulations(cells: dict[str, Cell]) -> list[Prediction]:
    """Returns the simulator's seconds of forward and backward of all steps with communication.

    Without torch's sharded ones, whose schedule needs the streams of a device: here they take a
    half longer.
    """
    found: list[Prediction] = []
    for name, cell in cells.items():
        taken = rounds_of(cell)
        if "units_s" in cell:
            layers = [(cell["tensors"], *seconds) for seconds in cell["units_s"]]
        else:
            steps = numpy.diff([0, *cell["ready_s"]])
            layers = [([s // 4], 0, t) for s, t in zip(cell["sizes"], steps, strict=True)][::-1]
        beside_s = statistics.median(taken["alone"]) - sum(f + b for _, f, b in layers)
        keys = ("tensors", "forward_s", "backward_s")
        model = [{"name": str(i), **dict(zip(keys, x, strict=True))} for i, x in enumerate(layers)]
        for arm in sorted(taken.keys() - {"alone", "all-reduces of auto"}):
            kind = arm.split(",")[0]
            if "units_s" in cell and kind == "torch":
                continue
            how = {"kind": "ddp", "parameter_bytes": 4, "gradient_bytes": 4}
            costs = {"all_reduce": cell["costs"]}
            if "units_s" in cell:
                how["kind"] = kind
                how["reshard_after_forward"] = arm.endswith("True")
                how["prefetch_depth"] = 2 if "depth 2" in arm else 1
                costs = cell["costs"][kind]
            else:
                how["bucket_caps_bytes"] = cell["plans"][arm]
            cluster = {"hosts": int(cell["link"][0]), "gpus_per_host": 1, "costs": costs}
            request = {"model": {"name": name, "layers": model}, "cluster": cluster}
            result = json.loads(_C.simulate(json.dumps({**request, "strategy": how})))
            predicted_s = beside_s + result["step_s"] - result["optimizer_s"]
            found.append((name, arm, predicted_s, taken[arm]))
    return found


def draw(rows: list[Cell]) -> None:
    """Draws step times over the bound as dots, one line per cell."""
    pyplot.rcParams.update(documents.STYLE)
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.36 * len(rows)), layout="constrained")
    names = [row["cell"] for row in rows]
    for arm, mark, colour in (
        (DEFAULT, "o", documents.SLOWER),
        ("torch, best of six caps", "D", documents.INK),
        (AUTO, "o", documents.FASTER),
    ):
        times = [row["ms"][arm if arm in row["ms"] else row["best"]] for row in rows]
        ratios = [time / row["bound_ms"] for time, row in zip(times, rows, strict=True)]
        axes.scatter(ratios, names, marker=mark, c=colour, label=arm, s=36, zorder=3)
    axes.grid(axis="y", color=documents.INK, alpha=0.2)
    axes.axvline(1, color=documents.INK, linestyle="--", linewidth=1)
    axes.set_xlabel("time of a step, earliest end of any bucket plan = 1.0 (median)")
    figure.legend(frameon=False, loc="outside upper center", ncols=3)
    documents.save(figure, "netlab")


def sharded_rows(cells: dict[str, Cell]) -> list[list[str]]:
    """Returns the median steps of each setting, and those of torch with the same setting."""
    rows = []
    for name, cell in cells.items():
        if "units_s" not in cell:
            continue
        ms = {arm: 1e3 * statistics.median(of) for arm, of in rounds_of(cell).items()}
        for reshard in ("True", "False"):
            ours = [ms[f"brigade, depth {depth}, reshard {reshard}"] for depth in (1, 2)]
            others = ms[f"torch, reshard {reshard}"], ms["alone"]
            rows.append([name, reshard, *(f"{value:.0f}" for value in (*ours, *others))])
    return rows


def report(data: Cell, writes: bool) -> None:
    cells = data["cells"]
    unsharded = {name: cell for name, cell in cells.items() if "units_s" not in cell}
    rows = [row_of(name, cell) for name, cell in unsharded.items()]
    table = [cells_of(row) for row in rows]
    mean = statistics.geometric_mean([row["over_best"]["median"] for row in rows] or [1])
    sharded = sharded_rows(cells)
    summary = errors_of(simulations(unsharded))[-3:]
    summary.insert(0, f"auto / best cap: geometric mean {mean:.3f} of {len(rows)} cells")
    if not writes:
        rows_of_text = [" | ".join(texts) for texts in (HEADER, *table, SHARDED, *sharded)]
        return print("\n".join([*rows_of_text, *errors_of(simulations(cells)), *summary]))
    figures = {"set_up": data["set_up"], "rows": rows, "sharded": sharded, "summary": summary}
    (documents.STORE / "netlab.json").write_text(json.dumps(figures, indent=1) + "\n")
    documents.write_table("netlab", HEADER, table)
    documents.write_table("netlab_sharded", SHARDED, sharded)
    documents.write_table("netlab_summary", ["summary"], [[line] for line in summary])
    draw(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--cells", default="", metavar="TEXT")
    parser.add_argument("--seconds", type=float, default=170, help="of a cell's rounds")
    parser.add_argument("--write", action="store_true", help="write docs/ in place of tables")
    given = parser.parse_args()
    if given.action == "run":
        return run(given.file, given.cells, given.seconds)
    report(json.loads(given.file.read_text()), given.write)


if __name__ == "__main__":
    main()
