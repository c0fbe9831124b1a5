"""Writes measurements and simulations as one HTML page that needs no network.

    brigade report sweep.json -o page.html

Reads the JSON files of `brigade bench`, `brigade bench collectives` and `brigade simulate`.
Compares sweeps of models with the same name. Needs the extra: pip install brigade[report].
report.html, the template, has the captions.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import re
import secrets
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

Data = dict[str, Any]

_SIGNIFICANCE = 0.01  # after many rounds, as in bucket_sweep/sweep.cc
_MOST_DRAWN = 1000  # per stream or curve; neighbours are merged
_LONGEST_TEXT = 300
_LONGEST_LABEL = 22

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

# Schemas: a type, {"keys": schema}, [schema of 1 or more items], (schema of items,),
# (schema, None) if null is allowed.
_ANY = "a finite number"
_QUARTILES = {"p25 median p75": float}
_BUCKETS = ({"bucket bytes": int, "launched_ms complete_ms": float},)
_BEST = {"cap": str, "caps_bytes": [int], "saved_ms": {"p25 median p75": _ANY}, "decided": bool}
_ARM = {
    "cap": str,
    "caps_bytes": [int],
    "buckets": int,
    "bucket_bytes": {"min median max": float},
    "step_ms": _QUARTILES,
    "rounds_ms": [[float]],
    "predicted_ms alone_ms": float,
    "added_ms": {"p25 median p75": _ANY},
    "overlap": (float, None),
    "timeline predicted_timeline": _BUCKETS,
}
_MODEL = {
    "name": str,
    "parameters gradient_bytes rounds steps": int,
    "local_ms": _QUARTILES,
    "bound_ms backward_ms": float,
    "arms": [_ARM],
    "best": ({**_BEST, "saved_share": _ANY, "rounds_faster rounds": int}, None),
    "cost": {"points": ({"bytes": int, "seconds": float},), "concurrency": int},
    "ready": ({"name": str, "bytes": int, "ready_ms": float},),
}
_STATES = ("parameters", "gradients", "optimizer", "unsharded", "activations")
_TRAFFIC = ("sent", "between_hosts", "between_racks")
_RESULT = {
    "step_s forward_s backward_s optimizer_s recompute_s exposed_s communication_s": float,
    "tflops mfu": float,
    " ".join(f"{key}_bytes_per_rank" for key in _TRAFFIC): float,
    "memory": {" ".join((*_STATES, "total", "capacity")): float, "fits": bool},
    "events": ({"stream name": str, "begin_s end_s": float},),
    "memory_over_step": ({"time_s bytes": float},),
}
_CURVE = ({"gpus": int, "step_s exposed_s tflops mfu": float},)
_COLLECTIVE = {"operation": str, "bytes pieces": int, "seconds": _QUARTILES}
_KINDS: dict[str, Data] = {
    "sweep": {"set_up": dict, "models": [_MODEL]},
    "collectives": {"set_up": dict, "collectives": [_COLLECTIVE]},
    "simulation": {"set_up request": dict, "result": _RESULT, "curve": _CURVE},
}
_ORDERED = {"p25": "median", "median": "p75", "launched_ms": "complete_ms", "begin_s": "end_s"}


def _clean(text: str) -> str:
    """Returns a short text without control characters, surrogates and changes of direction."""
    text = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _shown(value: Any) -> str:
    try:
        return _clean(value if isinstance(value, str) else json.dumps(value))
    except RecursionError:
        return "an object of too many levels"


def _checked(value: Any, schema: Any, place: str) -> Any:
    """Returns the part of `value` that `schema` has. Raises ValueError if it has another form."""

    def fail(expected: str, found: str | None = None) -> NoReturn:
        size = f"a list of {len(value)}" if isinstance(value, list) else None
        raise ValueError(
            f"{place}: expected {expected}, found {found or size or _shown(value)}.\n"
            "Write the file with brigade bench or brigade simulate of this version."
        )

    if schema is str:
        return _clean(value) if isinstance(value, str) else fail("a text")
    if schema is bool:
        return value if isinstance(value, bool) else fail("true or false")
    if schema in (int, float, _ANY):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) < 1e300 or (value < 0 and schema != _ANY):
            fail(_ANY if schema == _ANY else "a finite number of at least 0")
        return int(value) if schema is int else float(value)
    if isinstance(schema, tuple) and schema[-1] is None:
        return None if value is None else _checked(value, schema[0], place)
    if isinstance(schema, (list, tuple)):
        if not isinstance(value, list) or (isinstance(schema, list) and not value):
            fail("a list" if isinstance(schema, tuple) else "a list of at least 1 item")
        return [_checked(item, schema[0], f"{place}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        fail("an object")
    if schema is dict:
        return {_clean(key): item for key, item in value.items()}
    found: Data = {}
    for keys, item in schema.items():
        for key in keys.split():
            if key not in value:
                fail(f"the key {key!r}", _clean(", ".join(value)) or "an empty object")
            found[key] = _checked(value[key], item, f"{place}.{key}")
    for low, high in _ORDERED.items():
        if low in found and high in found and found[high] < found[low] - 1e-9 * abs(found[low]):
            fail(f"{low} <= {high}")
    return found


def _texts(values: Data, prefix: str = "") -> list[tuple[str, str]]:
    """Returns labels and short texts of an object and of the objects in it."""
    found = []
    for key, value in values.items():
        label = prefix + _clean(key)
        if isinstance(value, dict) and value and prefix.count(".") < 3:
            found += _texts(value, f"{label}.")
        else:
            found.append((label, _shown(value)))
    return found[:100]


def read_report_data(file: str | os.PathLike[str]) -> Data:
    """Reads one JSON file. Raises ValueError if it is of no known kind or incomplete."""
    name = _clean(os.fspath(file))
    try:
        data = json.loads(pathlib.Path(file).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: expected JSON, found {_clean(str(error))}") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(
            f"{name}: kind: expected {', '.join(_KINDS)}, found {_shown(kind)}.\n"
            "Pass JSON files of brigade bench or brigade simulate."
        )
    return {**_checked(data, _KINDS[kind], name), "kind": kind, "file": name}


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


def _quartiles(values: Sequence[float]) -> Data:
    cuts = statistics.quantiles([*values] * (2 if len(values) == 1 else 1), method="inclusive")
    return dict(zip(("p25", "median", "p75"), cuts, strict=True))


# ---- Advice.


def settings_of(caps_bytes: Sequence[int]) -> Data:
    """Returns the option of Python, and the lines of Python and C++ that set the caps."""
    mib = ["1e6" if cap == 2**63 - 1 else f"{cap / 2**20:.17g}" for cap in caps_bytes]
    option = f"bucket_cap_mb={mib[0] if caps_bytes[0] > 1 else 0}"
    if len(mib) > 1:
        option = f"bucket_cap_mb_list=[{', '.join(mib)}]"
    caps = ", ".join("INT64_MAX" if cap == 2**63 - 1 else str(cap) for cap in caps_bytes)
    cpp = f"    net, group, {{.reducer = {{.bucket_cap_bytes = {{{caps}}}}}}});"
    python = f"model = brigade.DistributedDataParallel(net, {option})"
    cpp = f"brigade::DistributedDataParallel model(\n{cpp}"
    return {"option": option, "lines": [("Python", python), ("C++", cpp)]}


def rounds_to_decide(best: Data, num_arms: int) -> int | None:
    """Returns the rounds after which the sign test decides, at the same share of faster rounds.

    Returns None if the cap is faster in at most half of the rounds.
    """
    share = best["rounds_faster"] / max(1, best["rounds"])
    for rounds in range(best["rounds"] + 1, 1000 if share > 0.5 else 0):
        faster = range(math.floor(share * rounds), rounds + 1)
        chance = sum(math.comb(rounds, k) for k in faster) / 2**rounds
        if (num_arms - 1) * chance <= _SIGNIFICANCE:
            return rounds
    return None


def verdict_of(model: Data) -> str:
    best = model["best"]
    if best is None:
        return "Keep the default: all caps give the same buckets."
    size, saved = _size(best), best["saved_ms"]
    gain = (
        f"{_number(abs(saved['median']))} ms ({100 * abs(best['saved_share']):.1f} %) "
        f"{'less' if saved['median'] > 0 else 'more'} per step than the default "
        f"[{_number(saved['p25'])}, {_number(saved['p75'])}], faster in "
        f"{best['rounds_faster']} of {best['rounds']} rounds"
    )
    if best["decided"]:
        option = settings_of(best["caps_bytes"])["option"]
        return f"Use {option if len(option) <= 60 else f'the buckets of {size}, below'}: {gain}."
    rounds = rounds_to_decide(best, len(model["arms"]))
    if saved["median"] <= 0 or rounds is None:
        return f"Keep the default: no cap is faster in most rounds. Closest: {size}, {gain}."
    return (
        f"Undecided: {best['rounds']} rounds are too few. {size} took {gain}, maybe by chance. "
        f"Run the same command with --rounds {rounds}, then open the new report."
    )


def compare_runs(before: Data, after: Data) -> list[Data]:
    """Returns the change of each arm that both runs have, by the medians of the rounds."""
    sizes = {size: arm for arm in after["arms"] for size in arm["cap"].split(", ")}
    rows = []
    for arm in before["arms"]:
        other = next((sizes[size] for size in arm["cap"].split(", ") if size in sizes), None)
        if other is None:
            continue
        old, new = (_quartiles([*map(statistics.median, a["rounds_ms"])]) for a in (arm, other))
        change = new["median"] - old["median"]
        apart = new["p25"] > old["p75"] or new["p75"] < old["p25"]
        result = "within the spread" if not apart else "slower" if change > 0 else "faster"
        row = {"cap": _size(arm), "old": old, "new": new, "change": change, "result": result}
        share = 100 * change / max(old["median"], 1e-9)
        rows.append({**row, "share": share, "magnitude": abs(share)})
    return rows


def knee_of(rows: Sequence[Data]) -> tuple[float, float, int]:
    """Returns the least time, the best bandwidth, and the least size with half of it."""
    rates = [(row["bytes"] / row["seconds"]["median"], row["bytes"]) for row in rows]
    best = max(rates)[0]
    least = min(row["seconds"]["median"] for row in rows)
    return least, best, min(size for rate, size in rates if 2 * rate >= best)


def _role(model: Data, arm: Data) -> str:
    """Returns the reason to draw the arm, or an empty text."""
    best = model["best"]
    names = ["default"] if arm is model["arms"][0] else []
    names += ["fastest"] if best and best["cap"] == arm["cap"] else []
    names += ["planned"] if "planned" in arm["cap"].split(", ") else []
    return ", ".join(names)


def _against_default(model: Data, arm: Data) -> str:
    pairs = zip(model["arms"][0]["rounds_ms"], arm["rounds_ms"], strict=False)
    changes = [statistics.median(b) - statistics.median(a) for a, b in pairs]
    faster = sum(change < 0 for change in changes)
    return f"{statistics.median(changes):+.2f} ms ({faster} of {len(changes)})"


def _merged(events: Sequence[Data], least_s: float) -> list[Data]:
    """Joins events of one kind that are too short and too close to be seen separately."""
    merged: list[Data] = []
    latest: dict[str, Data] = {}  # by kind, since kinds alternate
    for event in sorted(events, key=lambda event: event["begin_s"]):
        kind = event["name"].split(" ")[0]
        last = latest.get(kind)
        if last and event["end_s"] - last["begin_s"] < least_s:
            last["end_s"] = max(last["end_s"], event["end_s"])
        else:
            merged.append({**event, "kind": kind})
            latest[kind] = merged[-1]
    return merged


# ---- Plots.


class Scale(NamedTuple):
    """Axis of a plot. Without a base, the axis is linear and begins at 0."""

    label: str
    base: int | None
    text: Callable[[float], str]


_SIZE = Scale("size", 2, _bytes)
_TIME = Scale("time", 10, _seconds)
_COUNT = "{:.0f}".format
_RATE = Scale("bandwidth", 2, lambda rate: _bytes(rate) + "/s")


class _Plots:
    """Draws figures with Bokeh. Each row of a glyph ends with the text that hover shows."""

    def __init__(self) -> None:
        import bokeh.embed
        import bokeh.models
        import bokeh.plotting
        import bokeh.themes

        self.bokeh = bokeh
        axis = ("axis_line_color", "major_tick_line_color", "axis_label_text_color")
        fills = ("background_fill_color", "border_fill_color", "outline_line_color")
        attributes = {
            "Plot": dict.fromkeys(fills),
            "Axis": dict.fromkeys(axis, _COLORS["muted"][0])
            | {"major_label_text_color": _COLORS["text"][0], "minor_tick_line_color": None}
            | {"axis_label_text_font_style": "normal"},
            "Grid": {"grid_line_color": _COLORS["grid"][0]},
        }
        self.theme = bokeh.themes.Theme(json={"attrs": attributes})

    def figure(self, height: int, x_label: str, y_label: str = "", **options: Any) -> Any:
        options |= {"x_axis_label": x_label, "y_axis_label": y_label, "active_drag": None}
        options |= {"tools": "pan,box_zoom,reset", "sizing_mode": "stretch_width"}
        figure = self.bokeh.plotting.figure(height=height, toolbar_location="above", **options)
        figure.toolbar.logo = None
        return figure

    def rows(
        self, labels: Sequence[str], height: int, x_label: str, begin: float, end: float
    ) -> Any:
        """Returns a figure with a row per label and an axis from `begin` to `end`."""
        margin = 0.03 * (end - begin) or 1
        options = {"x_range": (max(0, begin - margin), end + margin), "min_border_left": 110}
        options["y_range"] = (len(labels) - 0.4, -0.6)
        figure = self.figure(height, x_label, **options)
        shown = range(0, len(labels), math.ceil(len(labels) / 16))
        figure.yaxis.ticker = [*shown]
        figure.yaxis.major_label_overrides = {i: _label(labels[i]) for i in shown}
        figure.ygrid.grid_line_color = None
        return figure

    def draw(self, figure: Any, glyph: str, rows: list[tuple], color: str, **style: Any) -> None:
        fields = ("y", "left", "right", "text") if glyph == "hbar" else ("x", "y", "text")
        columns = dict(zip(fields, zip(*rows, strict=True), strict=False))
        source = self.bokeh.models.ColumnDataSource(columns)
        names = {field: field for field in columns if field != "text"}
        getattr(figure, glyph)(source=source, color=_COLORS[color][0], **names, **style)

    def line_at(self, figure: Any, place: float, color: str, across: str = "height") -> None:
        style = {"line_color": _COLORS[color][0], "line_width": 2}
        style["line_dash"] = "dotted" if color == "gray" else "dashed"
        figure.add_layout(self.bokeh.models.Span(location=place, dimension=across, **style))

    def curves(self, series: Sequence[tuple[str, list[tuple]]], x: Scale, y: Scale) -> Any:
        """Draws points and straight lines between them."""
        kinds = {"x_axis_type": "log", "y_axis_type": "log" if y.base else "linear"}
        figure = self.figure(320, x.label, y.label, **kinds)
        for color, rows in series:
            rows = sorted(row for row in rows if row[0] > 0 and (row[1] > 0 or not y.base))
            if rows:
                self.draw(figure, "line", [row[:2] for row in rows], color, line_width=2)
                self.draw(figure, "scatter", rows, color, size=7)
        for i, (axis, scale) in enumerate(((figure.xaxis, x), (figure.yaxis, y))):
            values = [row[i] for _, rows in series for row in rows if row[i] > 0] or [1.0]
            if scale.base is None:
                figure.y_range.update(start=0, end=1.1 * max(values))
                continue
            low, high = (math.log(bound(values), scale.base) for bound in (min, max))
            powers = range(math.floor(low), math.ceil(high) + 1, math.ceil((high - low + 1) / 7))
            parts = (1, 2, 5) if scale.base == 10 and high - low < 3 else (1,)
            axis.ticker = ticks = [n * float(scale.base) ** k for k in powers for n in parts]
            texts = (re.sub(r"\.0+\b", "", scale.text(tick)) for tick in ticks)
            axis.major_label_overrides = dict(zip(ticks, texts, strict=True))
        return figure

    def block(self, key: str, figure: Any, **values: Any) -> Data:
        shown = [r for r in figure.renderers if "text" in r.data_source.data]
        options = {"renderers": shown, "tooltips": [("", "@text")], "visible": False}
        figure.add_tools(self.bokeh.models.HoverTool(**options))
        item = self.bokeh.embed.json_item(figure, theme=self.theme)
        return {"key": key, "plot": item, "height": figure.height, **values}

    # -- Sweeps.

    def spreads(self, figure: Any, times: dict[str, Data], color: str, shift: float = 0) -> None:
        """Draws a bar between the quartiles and a dot at the median, in each row."""
        rows = [
            (i + shift, time, f"{label}: {_interval(time)} ms")
            for i, (label, time) in enumerate(times.items())
        ]
        bars = [(y, time["p25"], time["p75"], text) for y, time, text in rows]
        dots = [(time["median"], y, text) for y, time, text in rows]
        self.draw(figure, "hbar", bars, color, height=0.26, fill_alpha=0.35)
        self.draw(figure, "scatter", dots, color, size=10)

    def steps(self, model: Data) -> Data:
        times = {_size(arm): arm["step_ms"] for arm in model["arms"]}
        predicted = {_size(arm): arm["predicted_ms"] for arm in model["arms"]}
        bound, local = model["bound_ms"], model["local_ms"]["median"]
        ends = [bound, local, *predicted.values()]
        ends += [time[key] for time in times.values() for key in ("p25", "p75")]
        figure = self.rows([*times], 110 + 34 * len(times), "ms per step", min(ends), max(ends))
        self.line_at(figure, bound, "green")
        self.line_at(figure, local, "gray")
        self.spreads(figure, times, "blue")
        rows = [
            (ms, i, f"{label}: {_number(ms)} ms predicted")
            for i, (label, ms) in enumerate(predicted.items())
        ]
        self.draw(figure, "scatter", rows, "orange", marker="diamond", size=14, fill_alpha=0)
        return self.block("steps", figure)

    def timeline(self, model: Data, arm: Data, end: float) -> Data:
        backward, measured = model["backward_ms"], arm["timeline"]
        count = max(len(measured), len(arm["predicted_timeline"]))
        labels = ["backward", *(f"bucket {i}" for i in range(count))]
        height = 90 + max(80, min(22 * len(labels), 420))
        figure = self.rows(labels, height, "ms since backward began", 0, end)
        waits = {"fill_color": _COLORS["red"][0], "fill_alpha": 0.1}
        figure.add_layout(self.bokeh.models.BoxAnnotation(left=backward, **waits))
        row = (0, 0, backward, f"backward: {_number(backward)} ms")
        self.draw(figure, "hbar", [row], "gray", height=0.7)
        ready = sorted(model["ready"], key=lambda gradient: -gradient["bytes"])[:_MOST_DRAWN]
        rows = [
            (ms := g["ready_ms"], 0, f"{g['name'][:80]}, {_bytes(g['bytes'])}: {_number(ms)} ms")
            for g in ready
        ]
        tick = {"marker": "dash", "angle": math.pi / 2, "size": 10}
        self.draw(figure, "scatter", rows, "text", **tick)
        for y, color, kind in ((0.8, "blue", ""), (1.2, "orange", "predicted_")):
            rows = []
            for i, bucket in enumerate(arm[f"{kind}timeline"]):
                times = (bucket["launched_ms"], bucket["complete_ms"])
                text = f"{' to '.join(map(_number, times))} ms {kind.rstrip('_')}"
                rows.append((y + i, *times, f"bucket {i}, {_bytes(bucket['bytes'])}: {text}"))
            self.draw(figure, "hbar", rows, color, height=0.36)
        self.line_at(figure, backward, "red")
        exposed = max(0, max(bucket["complete_ms"] for bucket in measured) - backward)
        name = ", ".join(dict.fromkeys([_size(arm), *_role(model, arm).split(", ")]))
        return self.block("timeline", figure, name=name, exposed=exposed)

    def cost(self, model: Data) -> Data:
        rows = [
            (p["bytes"], p["seconds"], f"{_bytes(p['bytes'])}: {_seconds(p['seconds'])}")
            for p in model["cost"]["points"]
        ]
        figure = self.curves([("blue", rows)], _SIZE, _TIME)
        for arm in model["arms"]:
            role = _role(model, arm)
            if "default" in role or "fastest" in role:
                color = "green" if "fastest" in role else "gray"
                self.line_at(figure, max(1, arm["bucket_bytes"]["median"]), color)
        return self.block("cost", figure)

    def sweep(self, model: Data) -> list[Data]:
        arms = model["arms"]
        drawn = [arm for arm in arms if arm["timeline"] and _role(model, arm)]
        both = [arm[key] for arm in drawn for key in ("timeline", "predicted_timeline")]
        end = max([model["backward_ms"], *(b["complete_ms"] for one in both for b in one)])
        rows = [(arm, _role(model, arm), _against_default(model, arm)) for arm in arms]
        blocks = [self.steps(model), *(self.timeline(model, arm, end) for arm in drawn)]
        blocks.append({"key": "arms", "rows": rows})
        return [*blocks, self.cost(model)] if model["cost"]["points"] else blocks

    def changes(self, rows: Sequence[Data]) -> Data:
        old, new = ({row["cap"]: row[run] for row in rows} for run in ("old", "new"))
        ends = [time[k] for times in (old, new) for time in times.values() for k in ("p25", "p75")]
        figure = self.rows([*old], 110 + 40 * len(rows), "ms per step", min(ends), max(ends))
        self.spreads(figure, old, "gray", -0.18)
        self.spreads(figure, new, "blue", 0.18)
        return self.block("changes", figure)

    # -- Collectives and simulations.

    def collectives(self, operations: dict[str, list[Data]]) -> list[Data]:
        every = [row for rows in operations.values() for row in rows]
        cut = max((row["bytes"] for row in every if row["pieces"] > 1), default=0)
        colors = dict(zip(operations, itertools.cycle(_SERIES), strict=False))
        drawn: dict[str, list] = {"seconds": [], "bandwidth": [], "pieces": []}
        for name, rows in operations.items():
            points: dict[str, list] = {key: [] for key in drawn}
            for row in rows:
                size, pieces, time = row["bytes"], row["pieces"], row["seconds"]["median"]
                text = f"{name}, {_bytes(size)} in {pieces}: {_interval(row['seconds'], _seconds)}"
                text += f", {_RATE.text(size / time)}"
                if pieces == 1:
                    points["seconds"].append((size, time, text))
                    points["bandwidth"].append((size, size / time, text))
                if size == cut:
                    points["pieces"].append((pieces, time, text))
            for key, series in drawn.items():
                series.append((colors[name], points[key]))
        legend = [(color, name, "●") for name, color in colors.items()]
        scales = {"seconds": (_SIZE, _TIME), "bandwidth": (_SIZE, _RATE)}
        scales["pieces"] = (Scale("pieces", 2, _COUNT), _TIME)
        return [
            self.block(key, self.curves(drawn[key], *axes), legend=legend, cut=cut)
            for key, axes in scales.items()
            if any(points for _, points in drawn[key])
        ]

    def memory(self, memory: Data) -> Data:
        most = max(memory["capacity"], memory["total"], sum(memory[state] for state in _STATES))
        figure = self.rows(["a rank"], 150, "GiB", 0, most / 2**30)
        left, legend = 0.0, []
        for state, color in zip(_STATES, _SERIES, strict=False):
            text, right = f"{state}, {_bytes(memory[state])}", left + memory[state] / 2**30
            self.draw(figure, "hbar", [(0, left, right, text)], color, height=0.6)
            legend.append((color, text, "■"))
            left = right
        self.line_at(figure, memory["capacity"] / 2**30, "red")
        legend.append(("red", f"capacity, {_bytes(memory['capacity'])}", "┆"))
        return self.block("memory", figure, legend=legend)

    def events(self, result: Data) -> Data:
        streams = sorted({event["stream"] for event in result["events"]})
        streams.sort(key=lambda stream: stream != "compute")
        figure = self.rows(streams, 110 + 50 * len(streams), "s", 0, result["step_s"])
        drawn: dict[str, list] = {}
        for y, stream in enumerate(streams):
            own = [event for event in result["events"] if event["stream"] == stream]
            for event in _merged(own, result["step_s"] / _MOST_DRAWN):
                begin, end = event["begin_s"], event["end_s"]
                row = (y, begin, end, f"{event['name']}: {_seconds(end - begin)}")
                drawn.setdefault(event["kind"], []).append(row)
        legend = []
        for color, (kind, rows) in zip(itertools.cycle(_SERIES), drawn.items(), strict=False):
            self.draw(figure, "hbar", rows, color, height=0.6)
            legend.append((color, kind, "■"))
        return self.block("events", figure, legend=legend)

    def memory_over_step(self, result: Data) -> Data:
        points, capacity = result["memory_over_step"], result["memory"]["capacity"] / 2**30
        size = math.ceil(len(points) / _MOST_DRAWN)
        parts = [points[i : i + size] for i in range(0, len(points), size)]
        rows = [(p[0]["time_s"], max(q["bytes"] for q in p) / 2**30) for p in parts]
        peak = max(gib for _, gib in rows)
        ranges = {"y_range": (0, 1.08 * max(peak, capacity)), "x_range": (0, result["step_s"])}
        figure = self.figure(260, "s", "GiB", **ranges)
        self.draw(figure, "step", rows, "blue", mode="after", line_width=2)
        self.line_at(figure, capacity, "red", "width")
        return self.block("memory_over_step", figure, peak=peak * 2**30)

    def scaling(self, curve: Sequence[Data]) -> list[Data]:
        texts = [
            f"{p['gpus']} GPUs: {_seconds(p['step_s'])}, {_seconds(p['exposed_s'])} of it waiting; "
            f"{_number(p['tflops'])} TFLOPS, {100 * p['mfu']:.1f} % MFU"
            for p in curve
        ]
        step, exposed, mfu = (
            [(p["gpus"], p[key], text) for p, text in zip(curve, texts, strict=True)]
            for key in ("step_s", "exposed_s", "mfu")
        )
        gpus, share = Scale("GPUs", 2, _COUNT), Scale("MFU", None, str)
        times = self.curves([("blue", step), ("red", exposed)], gpus, _TIME)
        return [
            self.block("curve", times),
            self.block("mfu", self.curves([("blue", mfu)], gpus, share)),
        ]

    def simulation(self, data: Data) -> list[Data]:
        result = data["result"]
        blocks = [self.memory(result["memory"])]
        blocks += [self.events(result)] if result["events"] else []
        blocks += [self.memory_over_step(result)] if result["memory_over_step"] else []
        blocks += self.scaling(data["curve"]) if len(data["curve"]) > 1 else []
        sent, hosts, racks = (result[f"{key}_bytes_per_rank"] for key in _TRAFFIC)
        labels = ["all", "between hosts", "between racks"]
        figure = self.rows(labels, 190, "GiB sent per rank and step", 0, sent / 2**30)
        sizes = zip(labels, (sent, hosts, racks), strict=True)
        rows = [(i, 0, n / 2**30, f"{text}: {_bytes(n)}") for i, (text, n) in enumerate(sizes)]
        self.draw(figure, "hbar", rows, "blue", height=0.6)
        return [*blocks, self.block("traffic", figure)]


# ---- The page.


def _sections_of(data: Data, plots: _Plots) -> list[Data]:
    section = {key: data[key] for key in ("kind", "file")} | {"set_up": _texts(data["set_up"])}
    if data["kind"] == "sweep":
        sections = []
        for model in data["models"]:
            verdict, best = verdict_of(model), model["best"]
            keeps = verdict.startswith("Keep the default")
            settings = None if keeps else settings_of(best["caps_bytes"])
            found = {"name": model["name"], "model": model, "blocks": plots.sweep(model)}
            sections.append(section | found | {"verdict": verdict, "settings": settings})
        return sections
    if data["kind"] == "simulation":
        model, memory = data["request"].get("model"), data["result"]["memory"]
        name = model.get("name") if isinstance(model, dict) else model
        section["set_up"] += _texts(data["request"])
        section |= {"name": _clean(str(name)), "result": data["result"]}
        section["largest"] = max(_STATES, key=lambda state: memory[state])
        return [{**section, "blocks": plots.simulation(data)}]
    operations: dict[str, list[Data]] = {}
    for row in data["collectives"]:
        if row["bytes"] and row["pieces"] and row["seconds"]["median"]:
            operations.setdefault(row["operation"], []).append(row)
    whole = {name: [r for r in rows if r["pieces"] == 1] for name, rows in operations.items()}
    table = {name: knee_of(rows) for name, rows in whole.items() if rows}
    section |= {"name": "Collectives", "table": table}
    return [{**section, "blocks": plots.collectives(operations)}]


def _changes_of(files: Sequence[Data], plots: _Plots) -> list[Data]:
    """Returns a section for each model that an earlier file has, too."""
    sections: list[Data] = []
    first: dict[str, tuple[Data, Data]] = {}
    for data in files:
        for model in data.get("models", ()):
            before, earlier = first.setdefault(model["name"], (model, data))
            rows = compare_runs(before, model) if earlier is not data else []
            if rows:
                texts = [dict(_texts(one["set_up"])) for one in (earlier, data)]
                keys = dict.fromkeys(itertools.chain(*texts))
                differ = [(key, *(text.get(key, "-") for text in texts)) for key in keys]
                section = {"kind": "changes", "name": model["name"], "rows": rows, "set_up": []}
                section |= {"files": (earlier["file"], data["file"])}
                section["differ"] = [row for row in differ if row[1] != row[2]]
                sections.append(section | {"blocks": [plots.changes(rows)]})
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

        plots = _Plots()
    except ModuleNotFoundError as error:
        raise ImportError(
            f"brigade report: expected the packages bokeh and jinja2, found no {error.name}.\n"
            "Install them: pip install brigade[report]",
            name=error.name,
        ) from error
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # Bokeh reads a definition before its references.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
    environment.filters |= {"number": _number, "bytes": _bytes, "seconds": _seconds}
    environment.filters |= {"interval": _interval, "size": _size}
    template = pathlib.Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    html = environment.from_string(template).render(
        sections=_changes_of(data, plots) + [s for one in data for s in _sections_of(one, plots)],
        colors=_COLORS,
        nonce=secrets.token_urlsafe(16),
        bokeh="\n".join(Resources(mode="inline", components=["bokeh"]).js_raw),
    )
    pathlib.Path(page).write_text(html, encoding="utf-8")
