"""Runs the benchmarks on 2 ranks, and draws and writes their results into the documentation.

    PYTHONPATH=build/release/python .venv/bin/python benchmarks/report.py

Needs less than 10 minutes on an idle machine. Stores the figures in docs/benchmarks/*.json,
draws docs/pictures/against_torch.svg and bucket_sizes.svg, and writes the tables: in README.md, and
docs/benchmarks/*.csv, which docs/benchmarks.md shows. --draw uses the stored figures.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import torch
from matplotlib import pyplot

ROOT = pathlib.Path(__file__).resolve().parents[1]
STORE = ROOT / "docs/benchmarks"
SHAPES = {"resnet50": "ResNet-50", "bert_base": "BERT-base", "gpt2": "GPT-2 small"}
SWEEP = "-m brigade bench --caps each,1,4,25,100,one --rounds 4 --steps 2"
NAMES = "real_steps", "fsdp_against_torch", "sharded_calls"
# Name of the JSON file, and arguments of torchrun.
PROGRAMS = {name: f"benchmarks/{name}.py" for name in NAMES}
PROGRAMS |= {name: f"{SWEEP} benchmarks/bucket_size.py:{name}" for name in SHAPES}
CAPS = ["default", "planned", "each", "1 MiB", "4 MiB", "25 MiB", "100 MiB", "one"]
# The rows of README's table and of the picture: settings, and their name in the picture.
MAIN = {
    ("25 MiB cap", "torch, fastest cap"): "",
    ("default", "torch, default"): "",
    ("reshard", "torch, reshard"): ", resharded",
    ("keep", "torch, keep"): ", kept unsharded",
}
INK, FASTER, SLOWER = "#010101", "#6366f1", "#d97706"
SCHEMES = "svg { --ink: #374151; } @media (prefers-color-scheme: dark) { svg { --ink: #d1d5db; } }"
STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "ytick.left"), False),
    "svg.hashsalt": "brigade",
}

Figures = dict[str, Any]


def machine() -> dict[str, str]:
    """Returns the conditions of measurements that start now."""
    model = re.search(r"model name\s*: (.+)", pathlib.Path("/proc/cpuinfo").read_text())
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return {
        "CPU": model[1] if model else "unknown",
        "cores": str(os.cpu_count()),
        "load at the start": f"{os.getloadavg()[0]:.1f}",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "commit": subprocess.check_output(describe, cwd=ROOT, text=True).strip(),
    }


def measure(rounds: str | None) -> None:
    """Runs each program on two ranks, without GPUs, and stores its figures."""
    set_up = machine()
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    quiet["PYTHONPATH"] = os.environ.get("PYTHONPATH", str(ROOT / "build/release/python"))
    for name, arguments in PROGRAMS.items():
        file = STORE / f"{name}.json"
        torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2"
        command = [*torchrun.split(), *arguments.split(), "--json", str(file.relative_to(ROOT))]
        command += ["--rounds", rounds] if rounds else []
        command += ["--tiny-rounds", rounds] if rounds and name == "real_steps" else []
        subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | quiet, check=True)
        figures = {"machine": set_up, **json.loads(file.read_text())}
        file.write_text(json.dumps(figures, indent=1) + "\n")


def draw_bars(axes: Any, labels: list[str], times: list[Figures], colours: list[str]) -> None:
    """Draws medians, with lines from quartile to quartile, from top to bottom."""
    middles = [time["median"] for time in times]
    errors = [[t["median"] - t["p25"] for t in times], [t["p75"] - t["median"] for t in times]]
    axes.barh(labels, middles, 0.62, color=colours, xerr=errors, ecolor=INK, capsize=2)


def save(figure: Any, name: str) -> None:
    """Writes a transparent SVG whose text follows the colour scheme of the page."""
    figure.axes[0].invert_yaxis()
    file = ROOT / f"docs/pictures/{name}.svg"
    figure.savefig(file, transparent=True, metadata={"Date": None})
    text = file.read_text().replace(INK, "var(--ink)")
    file.write_text(text.replace("<defs>", f"<style>{SCHEMES}</style><defs>", 1))


def draw_against_torch(rows: list[Figures]) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.36 * len(rows)), layout="constrained")
    labels = [row["model"] + MAIN[row["ours"], row["theirs"]] for row in rows]
    ratios = [row["ratio"] for row in rows]
    draw_bars(axes, labels, ratios, [FASTER if r["median"] <= 1 else SLOWER for r in ratios])
    for index, ratio in enumerate(ratios):
        axes.text(0.02, index, f"{ratio['median']:.2f}", color="white", va="center")
    axes.axvline(1, color=INK, linestyle="--", linewidth=1)
    axes.set_xlim(0, max(1.1, *(ratio["p75"] + 0.05 for ratio in ratios)))
    axes.set_xlabel("time of a step with brigade, torch = 1.0 (median and quartiles)")
    save(figure, "against_torch")


def added_ms(model: Figures, cap: str) -> Figures:
    """Returns the figures of one cap; caps with equal buckets share theirs."""
    return next(arm for arm in model["arms"] if cap in arm["cap"].split(", "))["added_ms"]


def draw_bucket_sizes(models: dict[str, Figures]) -> None:
    figure, panels = pyplot.subplots(1, 3, figsize=(8, 3), sharey=True, layout="constrained")
    for (name, model), axes in zip(models.items(), panels, strict=True):
        draw_bars(axes, CAPS, [added_ms(model, cap) for cap in CAPS], [FASTER])
        axes.set_title(name)
    panels[1].set_xlabel("ms that communication adds to a step (median and quartiles)")
    save(figure, "bucket_sizes")


def shown(time: Figures) -> str:
    digits = 2 if abs(time["median"]) < 10 else 0
    low, middle, high = (f"{time[key]:.{digits}f}" for key in ("p25", "median", "p75"))
    return f"{middle} [{low}, {high}]"


def write_table(name: str, header: list[str], rows: list[Any]) -> None:
    with (STORE / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def rewrite_readme(header: list[str], rows: list[Any]) -> None:
    """Replaces the table between README's markers."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
    table = "\n".join(["", *lines, "", ""])
    between = r"(?<=<!-- begin against_torch -->\n).*(?=<!-- end against_torch -->)"
    readme = ROOT / "README.md"
    text, count = re.subn(between, lambda _: table, readme.read_text(), flags=re.DOTALL)
    if count != 1:
        raise ValueError("README.md needs the markers of against_torch, once")
    readme.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--rounds", help="of each benchmark, for a trial (default: its own)")
    given = parser.parse_args()
    STORE.mkdir(exist_ok=True)
    if not given.draw:
        measure(given.rounds)
    found = {name: json.loads((STORE / f"{name}.json").read_text()) for name in PROGRAMS}
    rows = found["real_steps"]["rows"] + found["fsdp_against_torch"]["rows"]
    main_rows = [row for row in rows if (row["ours"], row["theirs"]) in MAIN]
    models = {title: found[name]["models"][0] for name, title in SHAPES.items()}
    pyplot.rcParams.update(STYLE)
    draw_against_torch(main_rows)
    draw_bucket_sizes(models)
    header = ["model", "brigade", "compared with", "ms", "ms, compared", "ratio"]
    names, times = ("model", "ours", "theirs"), ("ours_ms", "theirs_ms", "ratio")
    cells = [[r[k] for k in names] + [shown(r[k]) for k in times] for r in rows]
    write_table("against_torch", header, cells)
    rewrite_readme(header, [c for c, r in zip(cells, rows, strict=True) if r in main_rows])
    table = [[cap, *(shown(added_ms(m, cap)) for m in models.values())] for cap in CAPS]
    write_table("bucket_sizes", ["bucket cap", *models], table)
    calls = found["sharded_calls"]["table"]
    write_table("sharded_calls", calls[0], calls[1:])
    write_table("machine", ["condition", "value"], list(found["real_steps"]["machine"].items()))


if __name__ == "__main__":
    main()
