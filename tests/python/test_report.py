"""brigade.report: one page without network, escaped names, verdicts, changes, bad files."""

import html.parser
import json
import re
import sys

import pytest

from brigade import report

pytest.importorskip("bokeh")

_LOADING = {"src", "href", "data", "action", "poster", "srcset"}
HOSTILE = "$$x$$</script><script>alert(1)</script>\"'<img src=x onerror=alert(2)>\u202e\ud800名"


def _quartiles(median, spread=0.1):
    return {"p25": median - spread, "median": median, "p75": median + spread}


def _arm(cap, caps_bytes, step_ms):
    buckets = [{"bucket": 0, "bytes": 4 << 20, "launched_ms": 2.0, "complete_ms": 7.0}] * 3
    return {
        **{"cap": cap, "caps_bytes": caps_bytes, "buckets": 3, "step_ms": _quartiles(step_ms)},
        "bucket_bytes": {"min": 1, "median": 4 << 20, "max": 8 << 20},
        "rounds_ms": [[step_ms - 0.1, step_ms, step_ms + 0.1]] * 8,
        **{"predicted_ms": step_ms - 1, "added_ms": _quartiles(-0.01), "alone_ms": 5.0},
        **{"overlap": None, "timeline": buckets, "predicted_timeline": buckets},
    }


def _sweep(name="Net", saved_ms=2.0, rounds_faster=8, decided=True, cap="4 MiB", **model):
    arms = [_arm("default", [1 << 20, 25 << 20], 20.0), _arm(cap, [4 << 20], 20.0 - saved_ms)]
    best = {"cap": cap, "caps_bytes": [4 << 20], "saved_ms": _quartiles(saved_ms)}
    best |= {"saved_share": saved_ms / 20, "rounds_faster": rounds_faster}
    points = [{"bytes": 1 << k, "seconds": 1e-4 + 1e-9 * (1 << k)} for k in range(10, 24)]
    sizes = {"parameters": 3, "gradient_bytes": 12 << 20, "steps": 3}
    sizes |= {"rounds_taken": 8, "rounds_to_take": 8, "is_model_off": False}
    times = {"local_ms": _quartiles(15.0), "bound_ms": 16.0, "backward_ms": 6.0}
    times |= {"backward_slowdown": 0.0, "collective_stretch": 1.0}
    model = {"name": name, **sizes, **times, "best": {**best, "decided": decided}} | model
    model |= {"arms": arms, "cost": {"points": points, "concurrency": 2}}
    model["ready"] = [{"name": name, "bytes": 4 << 20, "ready_ms": 2.0 * i} for i in range(3)]
    return {"kind": "sweep", "set_up": {"ranks": "2", name: name}, "models": [model]}


def _sharded(
    name="reshard_after_forward=False, 2 modules per unit", over_default=0.8, decided=True
):
    ratios = {"reshard_after_forward=True": 1.0, name: over_default, "torch's fully_shard, True": 9}
    arms = [
        {"name": arm, "step_ms": _quartiles(5 * ratio), "over_default": _quartiles(ratio)}
        | {"rounds_ms": [5.0 * ratio] * 5, "decided": decided and ratio < 1}
        for arm, ratio in ratios.items()
    ]
    model = {"name": name, "parameters": 3, "units": 4, "rounds": 8, "rounds_taken": 5, "steps": 3}
    return {"kind": "sharded", "set_up": {}, "models": [model | {"arms": arms}]}


def _collectives(name="all-reduce"):
    row = {"operation": name, "bytes": 1 << 24, "seconds": _quartiles(1.0)}
    rows = [row | {"pieces": pieces} for pieces in (1, 8)]
    return {"kind": "collectives", "set_up": {}, "collectives": rows}


def _simulation(name="llama-7b", total=20e9, events=8):
    memory = dict.fromkeys(("parameters", "gradients", "optimizer", "unsharded"), 1e9)
    memory |= {"activations": total - 4e9, "total": total, "capacity": 40e9, "fits": total < 40e9}
    times = [f"{key}_s" for key in ("step", "forward", "backward", "optimizer", "recompute")]
    sent = [f"{key}_bytes_per_rank" for key in ("sent", "between_hosts", "between_racks")]
    keys = ("exposed_s", "communication_s", "tflops", "mfu")
    result = dict.fromkeys((*times, *sent, *keys), 1.0)
    result |= {"memory": memory, "memory_over_step": [{"time_s": 0.1, "bytes": 2e9}] * events}
    result["events"] = [
        {"stream": stream, "name": f"{kind} {name}", "begin_s": i / events, "end_s": i / events}
        for i in range(events)
        for stream, kind in (("communication", "all-gather"), ("compute", "forward"))
    ]
    curve = [{"gpus": n, "step_s": 1, "exposed_s": 0, "mfu": 0.4} for n in (1, 8)]
    shards = [{"shard_ranks": n, "memory_bytes": 3e9, "step_s": 1, "exposed_s": 0} for n in (2, 4)]
    curves = {"curve": curve, "shard_ranks_curve": shards}
    content = {"request": {"model": name, "strategy": {"kind": "fsdp2"}}, "result": result}
    return {"kind": "simulation", "set_up": {}, **curves, **content}


class _Page(html.parser.HTMLParser):
    """Tags with their attributes, the texts of a reader, and the data of the plots."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.plots = [("", {})], [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        tag, attributes = self.tags[-1]
        if attributes.get("type") == "application/json":
            self.plots.append(json.loads(text))
            self.tags.append(("text", {}))
        elif tag not in ("script", "style"):
            self.texts.append(text)


def _written(tmp_path, *contents):
    files = [tmp_path / f"{i}.json" for i, _ in enumerate(contents)]
    for file, data in zip(files, contents, strict=True):
        file.write_text(data if isinstance(data, str) else json.dumps(data))
    report.write_report(files, tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_page_of_all_kinds_is_one_file_that_loads_nothing(tmp_path):
    written = _written(tmp_path, _sweep(), _sharded(), _collectives(), _simulation(events=20_000))
    page = _Page(written)
    assert len(written) <= 6e6
    loads = [value for _, found in page.tags for key, value in found.items() if key in _LOADING]
    assert loads == [f"#section{i}" for i in (1, 2, 3, 4)]
    assert not re.findall(r"<style>.*?(?:@import|url\().*?</style>", written, re.S)
    (policy,) = (found["content"] for _, found in page.tags if "http-equiv" in found)
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert len(page.plots) == 4 + 1 + 3 + 8
    assert sum(len(json.dumps(plot)) for plot in page.plots) < 2e6  # short events are joined


@pytest.mark.parametrize("contents", [_sweep, _sharded, _collectives, _simulation])
def test_hostile_names_are_text(tmp_path, contents):
    pages = []
    for name in (HOSTILE + 5000 * "long ", "plain"):
        content = _sweep(name, cap=name) if contents is _sweep else contents(name)
        pages.append(_Page(_written(tmp_path, content)))
    assert [tag for tag, _ in pages[0].tags] == [tag for tag, _ in pages[1].tags]
    assert "</script><script>alert(1)</script>\"'<img src=x" in pages[0].text
    data = json.dumps(pages[0].plots, ensure_ascii=False)
    assert not {"\u202e", "\ud800"} & {*pages[0].text, *data}
    assert "long " * 200 not in pages[0].text + data
    labels = re.findall(r'"major_label_overrides": .*?\]\]', data)
    assert bool(labels) == (contents is not _collectives) and not any(
        "$$" in label for label in labels
    )  # no TeX


def test_the_verdict_has_the_interval_and_the_lines_to_paste(tmp_path):
    text = _Page(_written(tmp_path, _sweep())).text
    assert "Use bucket_cap_mb=4: 2.00 ms (10.0 %) less per step than the default [1.90, 2" in text
    assert "faster in 8 of 8 rounds." in text
    assert "model = brigade.DistributedDataParallel(net, bucket_cap_mb=4)" in text
    assert "net, group, {.reducer = {.bucket_cap_bytes = {4194304}}});" in text


def test_a_page_of_sharded_steps_has_the_lines_to_paste(tmp_path):
    text = _Page(_written(tmp_path, _sharded())).text
    setting = "reshard_after_forward=False, 2 modules per unit"
    verdict = f"Use {setting}: 20.0 % [10.0, 30.0] less per step than reshard_after_forward=True."
    assert verdict in text and "4 units; 5 rounds of 3 steps" in text
    assert "Interrupted after 5 of 8 rounds. Run the same command again." in text
    assert (
        "for i in range(0, len(blocks), 2): "
        "brigade.fully_shard(blocks[i : i + 2], reshard_after_forward=False) "
        "brigade.fully_shard(net)"
    ) in text
    deeper = _sharded("reshard_after_forward=True, prefetch_depth=2")
    lines = "brigade.fully_shard(block, reshard_after_forward=True, prefetch_depth=2)"
    assert lines in _Page(_written(tmp_path, deeper)).text


def test_sharded_steps_that_are_not_clearly_faster_keep_the_default():
    def verdict(*setting):
        return report.sharding_advice(_sharded(*setting, decided=False)["models"][0])

    text, lines = verdict("reshard_after_forward=False", 1.05)
    assert text.startswith("Keep reshard_after_forward=True: no setting is reliably faster.")
    assert "Closest: reshard_after_forward=False, 5.0 % [-15.0, 5.0] more" in text and not lines
    text, lines = verdict("reshard_after_forward=False", 0.95)
    assert text.startswith("Undecided: 5 rounds are too few. reshard_after_forward=False, 5.0 %")
    assert "Run the same command with --rounds 8," in text and lines
    text, _ = verdict("torch's fully_shard, False", 0.5)
    assert "Faster still: torch's fully_shard, False, 50.0 % [40.0, 60.0] less" in text


def test_contention_and_an_interruption_are_named(tmp_path):
    measured = {"backward_slowdown": 0.25, "collective_stretch": 1.5, "is_model_off": True}
    sweep = _sweep(decided=False, rounds_faster=6, rounds_to_take=24, **measured)
    text = _Page(_written(tmp_path, sweep)).text
    assert "maybe by chance. Run the same command with --resume, then open" in text
    assert "Interrupted after 8 of 24 rounds. Run the same command with --resume" in text
    assert "8 rounds of 3 steps" in text and "backward loses 25 % of its speed" in text
    assert "a collective takes 1.50 times as long" in text
    assert "predictions are unreliable" in text
    text = _Page(_written(tmp_path, _sweep())).text
    assert "Interrupted" not in text and "While" not in text


def test_a_simulation_without_a_capacity_and_curves(tmp_path):
    simulation = _simulation()
    simulation["result"]["memory"]["capacity"] = 0
    del simulation["shard_ranks_curve"]
    page = _Page(_written(tmp_path, simulation | {"curve": []}))
    assert "It needs 18.6 GiB per rank." in page.text and "capacity" not in page.text
    assert len(page.plots) == 4


def test_a_simulation_that_does_not_fit_names_the_largest_part(tmp_path):
    text = _Page(_written(tmp_path, _simulation(total=60e9))).text
    assert "It does not fit: 55.9 GiB of 37.3 GiB per rank." in text
    assert "The largest part is activations (52.2 GiB): checkpoint layers" in text


def test_a_verdict_without_a_faster_cap_says_why():
    def verdict(**options):
        return report.sweep_advice(_sweep(decided=False, **options)["models"][0])[0]

    undecided = verdict(rounds_faster=6)
    assert undecided.startswith("Undecided: 8 rounds are too few. 4 MiB took 2.00 ms (10.0 %) less")
    assert re.search(r"Run the same command with --rounds 27, ", undecided)
    assert verdict(rounds_faster=4).startswith("Keep the default: no cap is reliably faster")
    assert "Closest: 4 MiB, 1.00 ms (5.0 %) more" in verdict(saved_ms=-1, rounds_faster=0)
    assert verdict(best=None) == "Keep the default: all caps give the same buckets."


def test_settings_name_caps_of_all_forms():
    option, lines = report.settings_of((2**63 - 1,))
    assert (option, "{INT64_MAX}" in lines[1][1]) == ("bucket_cap_mb=1e6", True)
    assert report.settings_of((1,))[0] == "bucket_cap_mb=0"
    assert report.settings_of((524288, 3 << 20))[0] == "bucket_cap_mb_list=[0.5, 3]"


def test_two_runs_are_compared_by_arm(tmp_path):
    page = _Page(_written(tmp_path, _sweep(), _sweep(saved_ms=1.0)))
    assert "1 of 2 caps got slower and 0 faster than in the first run" in page.text
    assert "Largest change: 4 MiB, +1.00 ms (+5.6 %)." in page.text
    assert len(page.plots) == 1 + 4 + 4
    assert "No change: all 2 caps are within" in _Page(_written(tmp_path, _sweep(), _sweep())).text
    assert "No change" not in _Page(_written(tmp_path, _sweep(), _sweep("Other"))).text


_BAD = {  # path of a key to delete, or of the value to set
    "models.0.arms.1.step_ms": (..., "expected figures, found KeyError: 'step_ms'"),
    "models.0.steps": (..., "expected figures, found UndefinedError: .*'steps'"),
    "models.0.arms.1.alone_ms": (float("nan"), "expected JSON, found the number nan"),
    "models.0.backward_ms": ("3", "expected figures, found TypeError: .*"),
    "models.0.local_ms.p25": (1e301, r"expected JSON, found the number 1e\+301"),
    "models.0.arms": ([], "expected figures, found UndefinedError: .*"),
    "models.0.name": (["a"], "expected figures, found TypeError: .*"),
    "models": ({}, "expected figures, found ValueError: no figures"),
    "kind": (HOSTILE, "kind: expected sweep, sharded, collectives, simulation, found .*</script>"),
}


@pytest.mark.parametrize("path", _BAD)
def test_a_bad_value_is_an_error_that_names_the_file_and_the_finding(tmp_path, path):
    value, message = _BAD[path]
    found = content = _sweep()
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in parents:
        found = found[key]
    found.pop(last) if value is ... else found.__setitem__(last, value)
    with pytest.raises(ValueError, match=rf"0\.json[.:].*{message}"):
        _written(tmp_path, content)
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_is_no_json_object_is_an_error(tmp_path):
    messages = {"{": "JSON, found Expecting", "[" * 100_000: "JSON, found maximum recursion"}
    for text, message in {**messages, "[]": "sweep, .*, found None"}.items():
        with pytest.raises(ValueError, match=rf"0\.json: .*expected {message}"):
            _written(tmp_path, text)


def test_no_file_and_a_missing_extra_are_errors(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="expected a JSON file, found none"):
        report.write_report([], tmp_path / "page.html")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install brigade\[report\]"):
        _written(tmp_path, _sweep())
