"""Writes measurements and simulations as one HTML page that needs no network.

    brigade report sweep.json -o page.html

Reads the JSON files of `brigade bench`, `brigade bench collectives` and `brigade simulate`.
Compares sweeps of models with the same name. Needs the extra: pip install brigade[report].
report.html, the template, has the captions.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import secrets
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

Data = dict[str, Any]

_SIGNIFICANCE = 0.01  # after many rounds, as in bucket_sweep/sweep.cc
_MOST_DRAWN = 1000  # per stream or curve; neighbours are merged
_LONGEST_TEXT = 300
_LONGEST_LABEL = 24

# Light and dark. The page's script replaces the first by the second.
_COLORS = {
    "text": ("#1f2430", "#e5e8ee"),
    "muted": ("#5d6675", "#a3acbb"),
    "grid": ("#e2e5eb", "#2d3340"),
    "blue": ("#1d5fd1", "#7db0ff"),
    "orange": ("#d9700d", "#ffb066"),
    "green": ("#15803d", "#5ed08a"),
    "purple": ("#8527c4", "#c99bff"),
    "teal": ("#0d7f8c", "#4fcbd8"),
    "red": ("#c0262d", "#ff8087"),
    "gray": ("#7a8392", "#8f99a9"),
}
_SERIES = ("blue", "orange", "green", "purple", "teal", "red", "gray")

_KINDS = ("sweep", "sharded", "collectives", "simulation")
_STATES = ("parameters", "gradients", "optimizer", "unsharded", "activations")
_TRAFFIC = ("sent", "between_hosts", "between_racks")


def _clean(text: str) -> str:
    """Returns a short text without control characters, surrogates and changes of direction."""
    text = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _cleaned(value: Any) -> Any:
    """Returns JSON data with clean texts. Raises ValueError for a number that is not finite."""
    if isinstance(value, dict):
        return {_clean(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, (int, float)) and not abs(value) < 1e300:
        raise ValueError(f"the number {value}")
    return _clean(value) if isinstance(value, str) else value


@contextlib.contextmanager
def _naming(file: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns errors of data that are not as expected into a ValueError that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, *errors) as error:
        raise ValueError(
            f"{file}: expected figures, found {type(error).__name__}: {_clean(str(error))}.\n"
            "Write the file with brigade bench or brigade simulate of this version."
        ) from error


def _texts(values: Data, prefix: str = "") -> list[tuple[str, str]]:
    """Returns labels and short texts of an object and of the objects in it."""
    found = []
    for key, value in values.items():
        label = prefix + key
        if isinstance(value, dict) and value and prefix.count(".") < 3:
            found += _texts(value, f"{label}.")
        else:
            found.append((label, value if isinstance(value, str) else _clean(json.dumps(value))))
    return found[:100]


def read_report_data(file: str | os.PathLike[str]) -> Data:
    """Reads one JSON file. Raises ValueError if it is of no known kind."""
    name = _clean(os.fspath(file))
    try:
        data = _cleaned(json.loads(pathlib.Path(file).read_bytes()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: expected JSON, found {_clean(str(error))}") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in _KINDS:
        raise ValueError(
            f"{name}: kind: expected {', '.join(_KINDS)}, found {_clean(str(kind))}.\n"
            "Pass JSON files of brigade bench or brigade simulate."
        )
    return {**data, "file": name}


# ---- Texts of numbers.


def _number(value: float) -> str:
    """Returns three digits or more."""
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}"


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    """Returns `value`, which counts the last unit; each unit is `base` of the next one."""
    power = next((k for k in range(len(units) - 1, 0, -1) if value >= 0.999999 * base**k), 0)
    return f"{_number(value / base**power)} {units[-1 - power]}"


def _bytes(value: float) -> str:
    return _scaled(value, 1024, ("TiB", "GiB", "MiB", "KiB", "B"))


def _seconds(value: float) -> str:
    return _scaled(1e6 * value, 1000, ("s", "ms", "µs"))


def _interval(times: Data, text: Any = _number) -> str:
    return f"{text(times['median'])} [{text(times['p25'])}, {text(times['p75'])}]"


def _label(text: str) -> str:
    """Returns a short label without the delimiters that Bokeh reads as TeX."""
    text = re.sub(r"\$\$|\\[\[\]()]", lambda found: "\u200b".join(found[0]), text)
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "…"


def _size(arm: Data) -> str:
    """Returns the first of the sizes that give the arm's buckets."""
    return arm["cap"].split(", ")[0]


# ---- Advice.


def settings_of(caps_bytes: Sequence[int]) -> tuple[str, list[tuple[str, str]]]:
    """Returns the option of Python, and the lines of Python and C++ that set the caps."""
    mib = ["1e6" if cap == 2**63 - 1 else f"{cap / 2**20:.17g}" for cap in caps_bytes]
    option = f"bucket_cap_mb={mib[0] if caps_bytes[0] > 1 else 0}"
    if len(mib) > 1:
        option = f"bucket_cap_mb_list=[{', '.join(mib)}]"
    caps = ", ".join("INT64_MAX" if cap == 2**63 - 1 else str(cap) for cap in caps_bytes)
    cpp = f"    net, group, {{.reducer = {{.bucket_cap_bytes = {{{caps}}}}}}});"
    python = f"model = brigade.DistributedDataParallel(net, {option})"
    cpp = f"brigade::DistributedDataParallel model(\n{cpp}"
    return option, [("Python", python), ("C++", cpp)]


def _undecided(model: Data, found: str, rounds_faster: int) -> str | None:
    """Returns the advice to take more rounds. Returns None if 1000 would not decide."""
    taken, name = model["rounds_taken"], "--resume"
    if taken >= model.get("rounds_to_take", taken):
        # A sign test decides after these rounds, at the same share of faster ones.
        lead = max(1e-9, 2 * rounds_faster / max(1, taken) - 1)
        deviations = statistics.NormalDist().inv_cdf(1 - _SIGNIFICANCE / len(model["arms"]))
        rounds = max(taken + 1, math.ceil((deviations / lead) ** 2))
        if rounds > 1000:
            return None
        name = f"--rounds {rounds}"
    verdict = f"Undecided: {taken} rounds are too few. {found}, maybe by chance."
    return f"{verdict} Run the same command with {name}, then open the new report."


def sweep_advice(model: Data) -> tuple[str, list[tuple[str, str]]]:
    """Returns the verdict, and the lines to paste by language."""
    best = model["best"]
    if best is None:
        return "Keep the default: all caps give the same buckets.", []
    size, saved = _size(best), best["saved_ms"]
    gain = (
        f"{_number(abs(saved['median']))} ms ({100 * abs(best['saved_share']):.1f} %) "
        f"{'less' if saved['median'] > 0 else 'more'} per step than the default "
        f"[{_number(saved['p25'])}, {_number(saved['p75'])}], faster in "
        f"{best['rounds_faster']} of {model['rounds_taken']} rounds"
    )
    option, lines = settings_of(best["caps_bytes"])
    if best["decided"]:
        name = option if len(option) <= 60 else f"the buckets of {size}, below"
        return f"Use {name}: {gain}.", lines
    undecided = _undecided(model, f"{size} took {gain}", best["rounds_faster"])
    if saved["median"] > 0 and undecided:
        return undecided, lines
    return f"Keep the default: no cap is reliably faster. Closest: {size}, {gain}.", []


def _lines_of(setting: str) -> list[tuple[str, str]]:
    """Returns the program's lines for a setting of `brigade bench --units`."""
    form = r"(reshard_after_forward=\w+(?:, prefetch_depth=\d+)?)(?:, (\d+) modules per unit)?"
    found = re.fullmatch(form, setting)
    if not found:
        return []
    options, size = found.groups()
    begin = "for block in blocks:\n    brigade.fully_shard(block"
    if size:
        begin = f"for i in range(0, len(blocks), {size}):\n"
        begin += f"    brigade.fully_shard(blocks[i : i + {size}]"
    blocks = "blocks = [module for module in net.modules() if isinstance(module, Block)]"
    lines = f"{blocks}\n{begin}, {options})\nbrigade.fully_shard(net)"
    return [("Block: the class of --units", lines)]


def sharding_advice(model: Data) -> tuple[str, list[tuple[str, str]]]:
    """Returns the verdict, and the lines to paste."""

    def change(arm: Data, mark: str = ",") -> str:
        median, least, most = (100 - 100 * arm["over_default"][k] for k in ("median", "p75", "p25"))
        text = f"{arm['name']}{mark} {abs(median):.1f} % [{least:.1f}, {most:.1f}]"
        return f"{text} {'less' if median > 0 else 'more'} per step than {default['name']}"

    default, *others = model["arms"]
    others.sort(key=lambda arm: (not arm["decided"], arm["over_default"]["median"]))
    fastest = min(model["arms"], key=lambda arm: arm["over_default"]["median"])
    is_torch = fastest["name"].startswith("torch")
    note = f" Faster still: {change(fastest)}." if is_torch else ""
    best = next((arm for arm in others if not arm["name"].startswith("torch")), default)
    if best["decided"]:
        return f"Use {change(best, ':')}.{note}", _lines_of(best["name"])
    pairs = zip(best["rounds_ms"], default["rounds_ms"], strict=False)
    undecided = _undecided(model, change(best), sum(a < b for a, b in pairs))
    if best["over_default"]["median"] < 1 and undecided:
        return undecided + note, _lines_of(best["name"])
    verdict = f"Keep {default['name']}: no setting is reliably faster."
    return f"{verdict} Closest: {change(best)}.{note}", []


def compare_runs(before: Data, after: Data) -> list[Data]:
    """Returns the change of each arm that both runs have, by the quartiles of the steps."""
    sizes = {size: arm for arm in after["arms"] for size in arm["cap"].split(", ")}
    rows = []
    for arm in before["arms"]:
        for other in [sizes[size] for size in arm["cap"].split(", ") if size in sizes][:1]:
            old, new = arm["step_ms"], other["step_ms"]
            change = new["median"] - old["median"]
            apart = new["p25"] > old["p75"] or new["p75"] < old["p25"]
            result = "within the spread" if not apart else "slower" if change > 0 else "faster"
            share = 100 * change / max(old["median"], 1e-9)
            text = f"{change:+.2f} ms ({share:+.1f} %)"
            row = {"cap": _size(arm), "old": old, "new": new, "result": result}
            rows.append({**row, "share": share, "change": text})
    return rows


def verdict_of_changes(rows: Sequence[Data]) -> str:
    changed = [row for row in rows if row["result"] != "within the spread"]
    if not changed:
        return f"No change: all {len(rows)} caps are within the spread of steps."
    slower = sum(row["share"] > 0 for row in changed)
    largest = max(changed, key=lambda row: abs(row["share"]))
    return (
        f"{slower} of {len(rows)} caps got slower and {len(changed) - slower} faster than in the "
        f"first run, beyond the spread. Largest change: {largest['cap']}, {largest['change']}."
    )


def knee_of(rows: Sequence[Data]) -> tuple[float, float, int]:
    """Returns the least time, the best bandwidth, and the least size with half of it."""
    rates = [(row["bytes"] / row["seconds"]["median"], row["bytes"]) for row in rows]
    best = max(rates)[0]
    least = min(row["seconds"]["median"] for row in rows)
    return least, best, min(size for rate, size in rates if 2 * rate >= best)


def _roles(model: Data, arm: Data) -> list[str]:
    """Returns the reasons to draw the arm."""
    is_best = model["best"] and model["best"]["cap"] == arm["cap"]
    roles = {"default": arm is model["arms"][0], "fastest": is_best}
    roles["planned"] = "planned" in arm["cap"].split(", ")
    return [role for role, holds in roles.items() if holds]


def _against_default(model: Data, arm: Data) -> str:
    pairs = zip(model["arms"][0]["rounds_ms"], arm["rounds_ms"], strict=False)
    changes = [statistics.median(b) - statistics.median(a) for a, b in pairs]
    faster = sum(change < 0 for change in changes)
    return f"{statistics.median(changes):+.2f} ms ({faster} of {len(changes)})"


# ---- Plots.

# Numbers of the logarithmic axes, by label.
_LOGARITHMIC = {"size": "0 ib", "bytes per second": "0 ib", "ms": "0.[000]"}
_LOGARITHMIC |= dict.fromkeys(("pieces", "GPUs", "ranks per copy"), "0")
_MARKS = {"hbar": "■", "vspan": "┆", "hspan": "┅", "step": "━", "diamond": "◇"}
_MUTED = ("axis_line_color", "major_tick_line_color", "axis_label_text_color")
_THEME = {
    "Plot": dict.fromkeys(("background_fill_color", "border_fill_color", "outline_line_color")),
    "Grid": {"grid_line_color": _COLORS["grid"][0]},
    "Axis": dict.fromkeys(_MUTED, _COLORS["muted"][0])
    | {"major_label_text_color": _COLORS["text"][0], "minor_tick_line_color": None},
}


class _Plot:
    """Figure and its legend. With `labels`, y is the index of a label."""

    def __init__(self, key: str, x: str, y: str = "", labels: Sequence[str] = ()) -> None:
        from bokeh import models, plotting

        self.key, self.labels, self.legend, self.models = key, labels, [], models
        options: Data = {"tools": "pan,box_zoom,reset", "active_drag": None, "height": 300}
        options |= {"toolbar_location": "above", "sizing_mode": "stretch_width"}
        if labels:
            options["height"] = 100 + min(34 * len(labels), 420)
            options |= {"y_range": (len(labels) - 0.4, -0.6), "min_border_left": 110}
        for name, label in (("x", x), ("y", y)):
            options[f"{name}_axis_type"] = "log" if label in _LOGARITHMIC else "linear"
            options[f"{name}_axis_label"] = label
        self.figure = figure = plotting.figure(**options)
        figure.toolbar.logo = None
        axes = ((x, figure.xaxis, figure.x_range), (y, figure.yaxis, figure.y_range))
        for label, axis, ends in axes:
            if label in _LOGARITHMIC:
                base, parts = (10, [1, 2, 5]) if label == "ms" else (2, [1])
                axis.ticker = models.LogTicker(base=base, mantissas=parts)
                axis.formatter = models.NumeralTickFormatter(format=_LOGARITHMIC[label])
            elif label not in ("", "ms per step"):
                ends.start = 0
        if labels:
            shown = range(0, len(labels), math.ceil(len(labels) / 16))
            figure.yaxis.ticker = [*shown]
            figure.yaxis.major_label_overrides = {i: _label(labels[i]) for i in shown}
            figure.ygrid.grid_line_color = None

    def draw(self, glyph: str, rows: list[tuple], color: str, name: str = "", **style: Any) -> None:
        """Draws `rows` of coordinates, and of a text that hover shows; a `name` for the legend."""
        fields = {"hbar": ("y", "left", "right", "text"), "vspan": ("x",), "hspan": ("y",)}
        names = fields.get(glyph, ("x", "y", "text"))
        columns = dict(zip(names, zip(*rows, strict=True), strict=False))
        style |= {field: field for field in columns if field != "text"}
        source = self.models.ColumnDataSource(columns)
        getattr(self.figure, glyph)(source=source, color=_COLORS[color][0], **style)
        if name:
            self.legend.append((color, name, _MARKS.get(style.get("marker", glyph), "●")))

    def line_at(self, place: float, color: str, name: str, glyph: str = "vspan") -> None:
        dash = "dotted" if color == "gray" else "dashed"
        self.draw(glyph, [(place,)], color, name, line_width=2, line_dash=dash)

    def capacity(self, memory: Data, glyph: str) -> None:
        if size := memory["capacity"]:  # 0: unknown
            self.line_at(size / 2**30, "red", f"capacity, {_bytes(size)}", glyph)

    def spreads(self, times: Sequence[Data], color: str, name: str, shift: float = 0) -> None:
        """Draws a bar between the quartiles and a dot at the median, for each label."""
        bars, dots = [], []
        for i, (label, time) in enumerate(zip(self.labels, times, strict=True)):
            text = f"{label}: {_interval(time)} ms"
            bars.append((i + shift, time["p25"], time["p75"], text))
            dots.append((time["median"], i + shift, text))
        self.draw("hbar", bars, color, height=0.26, fill_alpha=0.35)
        self.draw("scatter", dots, color, name, size=10)

    def curve(self, points: Sequence[tuple], color: str, name: str = "") -> None:
        """Draws positive points and straight lines between them."""
        if rows := sorted(point for point in points if min(point[:2]) > 0):
            self.draw("line", [row[:2] for row in rows], color, line_width=2)
            self.draw("scatter", rows, color, name, size=7)

    def block(self, detail: str = "") -> Data:
        """Returns the figure for the page; `detail` ends its title."""
        from bokeh import embed, themes

        shown = [r for r in self.figure.renderers if "text" in r.data_source.data]
        hover = self.models.HoverTool(renderers=shown, tooltips=[("", "@text")], visible=False)
        self.figure.add_tools(hover)
        item = embed.json_item(self.figure, theme=themes.Theme(json={"attrs": _THEME}))
        block = {"key": self.key, "detail": detail, "plot": item, "legend": self.legend}
        return {**block, "height": self.figure.height}


def _steps(model: Data) -> Data:
    arms = model["arms"]
    plot = _Plot("steps", "ms per step", labels=[_size(arm) for arm in arms])
    plot.spreads([arm["step_ms"] for arm in arms], "blue", "measured")
    rows = [
        (ms := arm["predicted_ms"], i, f"{_size(arm)}: {_number(ms)} ms predicted")
        for i, arm in enumerate(arms)
    ]
    style = {"marker": "diamond", "size": 14, "fill_alpha": 0}
    plot.draw("scatter", rows, "orange", "predicted by the cost model", **style)
    plot.line_at(model["bound_ms"], "green", "bound: no buckets are faster, by the model")
    plot.line_at(model["local_ms"]["median"], "gray", "step without communication")
    return plot.block()


def _timeline(model: Data, arm: Data, end: float) -> Data:
    backward, measured = model["backward_ms"], arm["timeline"]
    labels = ["backward", *(f"bucket {i}" for i in range(len(measured)))]
    plot = _Plot("timeline", "ms since backward began", labels=labels)
    plot.figure.x_range.end = 1.03 * end
    waits = {"fill_color": _COLORS["red"][0], "fill_alpha": 0.1}
    plot.figure.add_layout(plot.models.BoxAnnotation(left=backward, **waits))
    row = (0, 0, backward, f"backward: {_number(backward)} ms")
    plot.draw("hbar", [row], "gray", "backward alone; ticks: a gradient is ready", height=0.7)
    ready = sorted(model["ready"], key=lambda gradient: -gradient["bytes"])[:_MOST_DRAWN]
    rows = [
        (ms := g["ready_ms"], 0, f"{g['name'][:80]}, {_bytes(g['bytes'])}: {_number(ms)} ms")
        for g in ready
    ]
    tick = {"marker": "dash", "angle": math.pi / 2, "size": 10}
    plot.draw("scatter", rows, "text", **tick)
    for y, color, kind in ((0.8, "blue", "measured"), (1.2, "orange", "predicted")):
        rows = []
        for i, bucket in enumerate(measured if y < 1 else arm["predicted_timeline"]):
            times = (bucket["launched_ms"], bucket["complete_ms"])
            text = f"{' to '.join(map(_number, times))} ms {kind}"
            rows.append((y + i, *times, f"bucket {i}, {_bytes(bucket['bytes'])}: {text}"))
        plot.draw("hbar", rows, color, f"bucket, {kind}", height=0.36)
    plot.line_at(backward, "red", "end of backward alone")
    exposed = max(0, max(bucket["complete_ms"] for bucket in measured) - backward)
    name = ", ".join(dict.fromkeys([_size(arm), *_roles(model, arm)]))
    return plot.block(f"{name}: collectives end {_number(exposed)} ms after backward alone would")


def _cost(model: Data) -> Data:
    plot = _Plot("cost", "size", "ms")
    rows = [
        (p["bytes"], 1e3 * p["seconds"], f"{_bytes(p['bytes'])}: {_seconds(p['seconds'])}")
        for p in model["cost"]["points"]
    ]
    plot.curve(rows, "blue", "measured")
    for arm in model["arms"]:
        for role in {"default", "fastest"}.intersection(_roles(model, arm)):
            color = "gray" if role == "default" else "green"
            plot.line_at(max(1, arm["bucket_bytes"]["median"]), color, f"median bucket, {role}")
    return plot.block()


def _sweep(model: Data) -> list[Data]:
    arms = model["arms"]
    drawn = [arm for arm in arms if arm["timeline"] and _roles(model, arm)]
    both = [arm[key] for arm in drawn for key in ("timeline", "predicted_timeline")]
    end = max([model["backward_ms"], *(b["complete_ms"] for one in both for b in one)])
    rows = [(arm, ", ".join(_roles(model, arm)), _against_default(model, arm)) for arm in arms]
    blocks = [_steps(model), *(_timeline(model, arm, end) for arm in drawn)]
    blocks.append({"key": "arms", "detail": "", "rows": rows})
    return [*blocks, _cost(model)] if model["cost"]["points"] else blocks


def _collectives(operations: dict[str, list[Data]]) -> list[Data]:
    every = [row for rows in operations.values() for row in rows]
    cut = max((row["bytes"] for row in every if row["pieces"] > 1), default=0)
    seconds = _Plot("seconds", "size", "ms")
    bandwidth = _Plot("bandwidth", "size", "bytes per second")
    pieces = _Plot("pieces", "pieces", "ms")
    for color, (name, rows) in zip(itertools.cycle(_SERIES), operations.items(), strict=False):
        points = []
        for row in rows:
            size, count, time = row["bytes"], row["pieces"], row["seconds"]["median"]
            text = f"{name}, {_bytes(size)} in {count}: {_interval(row['seconds'], _seconds)}"
            points.append((size, count, time, f"{text}, {_bytes(size / time)}/s"))
        whole = [point for point in points if point[1] == 1]
        seconds.curve([(size, 1e3 * time, text) for size, _, time, text in whole], color, name)
        bandwidth.curve([(size, size / time, text) for size, _, time, text in whole], color, name)
        same = [(count, 1e3 * time, text) for size, count, time, text in points if size == cut]
        pieces.curve(same, color, name)
    blocks = [plot.block() for plot in (seconds, bandwidth) if plot.legend]
    return blocks + ([pieces.block(_bytes(cut))] if pieces.legend else [])


def _memory(memory: Data) -> Data:
    plot = _Plot("memory", "GiB", labels=["a rank"])
    left = 0.0
    for state, color in zip(_STATES, _SERIES, strict=False):
        text, right = f"{state}, {_bytes(memory[state])}", left + memory[state] / 2**30
        plot.draw("hbar", [(0, left, right, text)], color, text, height=0.6)
        left = right
    plot.capacity(memory, "vspan")
    return plot.block()


def _events(result: Data) -> Data:
    streams = sorted({event["stream"] for event in result["events"]})
    streams.sort(key=lambda stream: stream != "compute")
    plot = _Plot("events", "s", labels=streams)
    kinds: dict[str, dict[tuple, Data]] = {}
    for event in result["events"]:
        # Joins events of one kind that are too close to be seen separately.
        place = (event["stream"], int(_MOST_DRAWN * event["begin_s"] / (result["step_s"] or 1)))
        joined = kinds.setdefault(event["name"].split(" ")[0], {}).setdefault(place, {**event})
        joined["end_s"] = max(joined["end_s"], event["end_s"])
    for color, (kind, joined) in zip(itertools.cycle(_SERIES), kinds.items(), strict=False):
        rows = []
        for event in joined.values():
            begin, end = event["begin_s"], event["end_s"]
            text = f"{event['name']}: {_seconds(end - begin)}"
            rows.append((streams.index(event["stream"]), begin, end, text))
        plot.draw("hbar", rows, color, kind, height=0.6)
    return plot.block()


def _memory_over_step(result: Data) -> Data:
    points, size = result["memory_over_step"], len(result["memory_over_step"]) // _MOST_DRAWN + 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    rows = [(p[0]["time_s"], max(q["bytes"] for q in p) / 2**30) for p in parts]
    plot = _Plot("memory_over_step", "s", "GiB")
    plot.draw("step", rows, "blue", "in use", mode="after", line_width=2)
    plot.capacity(result["memory"], "hspan")
    return plot.block(f"at most {_number(max(gib for _, gib in rows))} GiB")


# Count of ranks and its axis, another figure, its axis and unit; by curve.
_CURVES: dict[str, tuple[str, str, str, str, float]] = {
    "curve": ("gpus", "GPUs", "mfu", "% MFU", 0.01),
    "shard_ranks_curve": ("shard_ranks", "ranks per copy", "memory_bytes", "GiB", 2**30),
}


def _scaling(key: str, curve: Sequence[Data], memory: Data) -> list[Data]:
    count, x, other, y, unit = _CURVES[key]
    times, others = _Plot(key, x, "ms"), _Plot(other, x, y)
    points: list[list[tuple]] = [[], [], []]
    for point in curve:
        values = (1e3 * point["step_s"], 1e3 * point["exposed_s"], point[other] / unit)
        text = "{} {}: {} ms, {} ms of it waiting; {} {}"
        text = text.format(point[count], x, *map(_number, values), y)
        for series, value in zip(points, values, strict=True):
            series.append((point[count], value, text))
    times.curve(points[0], "blue", "step")
    times.curve(points[1], "red", "part that waits for communication")
    others.curve(points[2], "blue", y)
    if y == "GiB":
        others.capacity(memory, "hspan")
    return [plot.block() for plot in (times, others) if plot.legend]


def _simulation(data: Data) -> list[Data]:
    result = data["result"]
    blocks = [_memory(result["memory"])]
    blocks += [_events(result)] if result["events"] else []
    blocks += [_memory_over_step(result)] if result["memory_over_step"] else []
    for key in _CURVES:
        curve = data.get(key) or ()
        blocks += _scaling(key, curve, result["memory"]) if len(curve) > 1 else []
    labels = ["all", "between hosts", "between racks"]
    plot = _Plot("traffic", "GiB sent per rank and step", labels=labels)
    sizes = [result[f"{key}_bytes_per_rank"] for key in _TRAFFIC]
    rows = [(i, 0, n / 2**30, f"{labels[i]}: {_bytes(n)}") for i, n in enumerate(sizes)]
    plot.draw("hbar", rows, "blue", height=0.6)
    return [*blocks, plot.block()]


def _changes(rows: Sequence[Data]) -> Data:
    plot = _Plot("changes", "ms per step", labels=[row["cap"] for row in rows])
    plot.spreads([row["old"] for row in rows], "gray", "first run", -0.18)
    plot.spreads([row["new"] for row in rows], "blue", "second run", 0.18)
    return plot.block()


def _sharded(model: Data) -> list[Data]:
    arms = model["arms"]
    long = "reshard_after_forward=|_depth(?==)| modules| fully_shard"
    plot = _Plot("settings", "ms per step", labels=[re.sub(long, "", a["name"]) for a in arms])
    ours = [arm["step_ms"] for arm in arms if not arm["name"].startswith("torch")]
    ours = ours or [arms[0]["step_ms"]]
    least, most = min(time["p25"] for time in ours), max(time["p75"] for time in ours)
    plot.figure.x_range.update(start=0.95 * least, end=1.05 * most)
    plot.spreads([arm["step_ms"] for arm in arms], "blue", "measured")
    return [plot.block(), {"key": "sharded", "detail": "", "rows": arms}]


# ---- The page.


def _sections_of(data: Data) -> list[Data]:
    kind, shared = data["kind"], {"kind": data["kind"], "file": data["file"]}
    shared |= {"set_up": _texts(data["set_up"]), "verdict": None, "lines": (), "model": None}
    sections = []
    for model in data["models"] if kind in ("sweep", "sharded") else ():
        advice, draw = (sweep_advice, _sweep) if kind == "sweep" else (sharding_advice, _sharded)
        verdict, lines = advice(model)
        section = {**shared, "name": model["name"], "model": model, "blocks": draw(model)}
        sections.append({**section, "verdict": verdict, "lines": lines})
    if kind == "simulation":
        model, memory = data["request"].get("model"), data["result"]["memory"]
        name = model.get("name") if isinstance(model, dict) else model
        shared["set_up"] += _texts(data["request"])
        section = {"name": _clean(str(name)), "result": data["result"], "blocks": _simulation(data)}
        section["largest"] = max(_STATES, key=lambda state: memory[state])
        sections.append(shared | section)
    if kind == "collectives":
        operations: dict[str, list[Data]] = {}
        for row in data["collectives"]:
            if row["bytes"] and row["pieces"] and row["seconds"]["median"]:
                operations.setdefault(row["operation"], []).append(row)
        whole = {name: [r for r in rows if r["pieces"] == 1] for name, rows in operations.items()}
        table = {name: knee_of(rows) for name, rows in whole.items() if rows}
        blocks = _collectives(operations)
        sections.append({**shared, "name": "Collectives", "table": table, "blocks": blocks})
    if not sections:
        raise ValueError("no figures")
    return sections


def _changes_of(files: Sequence[Data]) -> list[Data]:
    """Returns a section for each model that an earlier file has, too."""
    sections: list[Data] = []
    first: dict[str, tuple[Data, Data]] = {}
    for data in files:
        for model in data["models"] if data["kind"] == "sweep" else ():
            before, earlier = first.setdefault(model["name"], (model, data))
            rows = compare_runs(before, model) if earlier is not data else []
            if rows:
                texts = [dict(_texts(one["set_up"])) for one in (earlier, data)]
                keys = dict.fromkeys(itertools.chain(*texts))
                differ = [(key, *(text.get(key, "-") for text in texts)) for key in keys]
                section = {"kind": "changes", "name": model["name"], "rows": rows, "set_up": []}
                section |= {"lines": (), "model": None}
                section["verdict"] = verdict_of_changes(rows)
                section["files"] = (earlier["file"], data["file"])
                section["differ"] = [row for row in differ if row[1] != row[2]]
                sections.append(section | {"blocks": [_changes(rows)]})
    return sections


def write_report(files: Sequence[str | os.PathLike[str]], page: str | os.PathLike[str]) -> None:
    """Writes one HTML page about all `files`.

    Raises:
        ImportError: bokeh or jinja2 is not installed.
        ValueError: `files` is empty, or a file is not complete JSON of a known kind.
        OSError: A file can't be read, or the page can't be written.
    """
    if not files:
        raise ValueError("brigade report: expected a JSON file, found none.\nPass one or several.")
    data = [read_report_data(file) for file in files]
    try:
        import jinja2
        from bokeh.resources import Resources
    except ModuleNotFoundError as error:
        raise ImportError(
            f"brigade report: expected the packages bokeh and jinja2, found no {error.name}.\n"
            "Install them: pip install brigade[report]",
            name=error.name,
        ) from error
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    # Bokeh reads a definition before its references.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
    environment.filters |= {"number": _number, "bytes": _bytes, "seconds": _seconds}
    environment.filters |= {"interval": _interval, "size": _size}
    template = pathlib.Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    sections: list[Data] = []
    for one in data:
        with _naming(one["file"]):
            sections += _sections_of(one)
    with _naming(", ".join(one["file"] for one in data), jinja2.TemplateError):
        html = environment.from_string(template).render(
            sections=_changes_of(data) + sections,
            colors=_COLORS,
            nonce=secrets.token_urlsafe(16),
            bokeh="\n".join(Resources(mode="inline", components=["bokeh"]).js_raw),
        )
    pathlib.Path(page).write_text(html, encoding="utf-8")
