"""brigade.bench: what is measured, what figures say, how they are shown, the command."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade
from brigade import bench
from brigade.bench import Arm, Samples, Track, Workload
from brigade.bench._gradient_check import GradientCheck
from brigade.bench._ranks import Ranks
from brigade.bench._statistics import chance_of, quartiles

from ranks import run_ranks

_EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "python" / "bench_mlp.py"


# ----------------------------------------------------------------- statistics


def _samples(default_ms: list[float], other_ms: list[float], local_ms: float = 10) -> Samples:
    """One step per round of the default and of one other arm."""
    return Samples(
        name="Net",
        parameters=3,
        gradient_bytes=3_000_000,
        local_ms=[[local_ms]] * len(default_ms),
        tracks=[
            Track([Arm("default", {})], [1_000_000, 2_000_000], [[t] for t in default_ms], [4.0]),
            Track(
                [Arm("4 MiB", {"bucket_cap_mb": 4}), Arm("one", {"bucket_cap_mb": 9})],
                [3_000_000],
                [[t] for t in other_ms],
                [8.0],
                sums_right=True,
            ),
        ],
    )


def test_quartiles_lie_linearly_between_samples():
    assert quartiles([4, 1, 3, 2]) == bench.Quartiles(1.75, 2.5, 3.25)
    assert quartiles([7]) == bench.Quartiles(7, 7, 7)


def test_a_fair_coin_has_its_chances():
    assert chance_of(0, 3) == 1
    assert chance_of(3, 3) == 1 / 8
    assert chance_of(2, 3) == 4 / 8


def test_differences_are_taken_within_a_round():
    samples = _samples([20, 120], [15, 110])
    samples.local_ms = [[10, 12, 14], [100, 101, 102]]
    summary = bench.summarize(samples)
    assert summary.arms[0].exposed_ms.median == (8 + 19) / 2
    assert summary.arms[1].exposed_ms.median == (3 + 9) / 2
    assert summary.best.saved_ms == bench.Quartiles(6.25, 7.5, 8.75)
    assert summary.arms[1].overlap == 1 - 6 / 8


def test_a_size_that_is_faster_in_every_round_is_recommended():
    best = bench.summarize(_samples([20] * 8, [18] * 8)).best
    assert best.decided
    assert (best.rounds_faster, best.rounds) == (8, 8)
    assert best.saved_share == 0.1


def test_a_size_that_chance_may_have_made_faster_is_not():
    best = bench.summarize(_samples([20] * 8, [18] * 6 + [21] * 2)).best
    assert best.saved_ms.median == 2
    assert not best.decided


def test_the_more_sizes_are_tried_the_less_chance_is_allowed():
    samples = _samples([20] * 5, [18] * 5)
    assert bench.summarize(samples).best.decided  # 1/32
    samples.tracks += [samples.tracks[1]]
    assert not bench.summarize(samples).best.decided  # 2/32


# ------------------------------------------------------------------ rendering


def test_the_table_has_a_row_per_plan_and_a_sentence():
    text = bench.report(bench.summarize(_samples([20] * 8, [18] * 8)))
    assert text.splitlines() == [
        "Net: 3 gradients, 3.00 MB; step without a wrapper 10.0 ms [10.0, 10.0]",
        "cap         buckets       min   median      max   step ms        [p25, p75]"
        "  exposed ms  alone ms  overlap  sums",
        "default           2   1.00 MB  1.50 MB  2.00 MB      20.0      [20.0, 20.0]"
        "        10.0       4.0     none  WRONG",
        "4 MiB, one        1   3.00 MB  3.00 MB  3.00 MB      18.0      [18.0, 18.0]"
        "         8.0       8.0     none  right",
        "recommended: bucket_cap_mb=4; 2.0 ms (10.0 %) less per step than the default [2.0, 2.0], "
        "faster in 8 of 8 rounds",
    ]


def _sentence(samples: Samples) -> str:
    return bench.report(bench.summarize(samples)).splitlines()[-1]


def test_the_sentence_says_when_the_default_is_to_be_kept():
    assert _sentence(_samples([20] * 4, [21] * 4)) == (
        "recommended: the default; no other size is faster"
    )
    assert _sentence(_samples([20] * 3, [18] * 3)) == (
        "recommended: the default; 4 MiB, one: 2.0 ms (10.0 %) less per step than the default "
        "[2.0, 2.0], faster in 3 of 3 rounds, which may be chance"
    )
    alone = _samples([20], [20])
    del alone.tracks[1]
    assert _sentence(alone) == "recommended: the default; every size tried gives its buckets"


def test_json_has_what_the_table_has():
    data = bench.to_json(bench.summarize(_samples([20] * 8, [18] * 8)), {"ranks": "2"})
    data = json.loads(json.dumps(data))
    assert data["set_up"] == {"ranks": "2"}
    (model,) = data["models"]
    assert model["gradient_bytes"] == 3_000_000
    assert model["arms"][1] == {
        "cap": "4 MiB, one",
        "options": {"bucket_cap_mb": 4},
        "buckets": 1,
        "bucket_bytes": {"min": 3_000_000, "median": 3_000_000, "max": 3_000_000},
        "step_ms": {"p25": 18, "median": 18, "p75": 18},
        "exposed_ms": {"p25": 8, "median": 8, "p75": 8},
        "alone_ms": 8,
        "overlap": 0,
        "sums_verified": True,
    }
    assert model["best"]["options"] == {"bucket_cap_mb": 4}
    assert model["best"]["decided"] is True


# ---------------------------------------------------------- what users give


def test_sizes_become_arguments():
    parameters = [torch.zeros(1024, 1024)]  # 4 MiB
    arms = bench.caps(parameters, ["each", "0.25", 1, "one"])
    assert [(arm.label, dict(arm.options)) for arm in arms] == [
        ("one per parameter", {"bucket_cap_mb": 0}),
        ("0.25 MiB", {"bucket_cap_mb": 0.25}),
        ("1 MiB", {"bucket_cap_mb": 1}),
        ("one", {"bucket_cap_mb": 4}),
    ]


@pytest.mark.parametrize("size", ["x", "-1", "0", "nan", ""])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match="expected sizes in MiB above 0"):
        bench.caps([torch.zeros(1)], [size])


def test_a_factory_gives_a_pair_or_a_workload():
    module = nn.Linear(2, 2)
    pair = bench.make_workload(lambda: (module, torch.sum))
    assert (pair.module, pair.loss, pair.title()) == (module, torch.sum, "Linear")
    named = Workload(module, torch.sum, {"static_graph": True}, name="tiny")
    assert bench.make_workload(lambda: named) is named
    with pytest.raises(TypeError, match="must return a pair"):
        bench.make_workload(lambda: module)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3, torch.sum), TypeError, "not wrapped yet, got int"),
        ((nn.Linear(1, 1), None), TypeError, "must be a function of the module, got None"),
        ((nn.ReLU(), torch.sum), ValueError, "ReLU has no parameter"),
        (
            (nn.Linear(1, 1), torch.sum, {"bucket_cap_mb": 3}),
            ValueError,
            "static_graph; got bucket_cap_mb",
        ),
    ],
)
def test_a_workload_that_can_not_be_timed_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        Workload(*arguments)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mlp", "expected module:function"),
        ("no_such_module:mlp", "there is no module no_such_module"),
        ("no_such_file.py:mlp", "there is no file"),
        ("json:no_such", "json has no function 'no_such'"),
    ],
)
def test_a_name_without_a_factory_is_refused(name, text):
    with pytest.raises(ValueError, match=text):
        bench.find_factory(name)


def test_a_factory_is_found_by_module_and_by_file(tmp_path, monkeypatch):
    (tmp_path / "my_training.py").write_text("import my_data\ndef net(): return my_data.NUMBER\n")
    (tmp_path / "my_data.py").write_text("NUMBER = 7\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert bench.find_factory(f"{tmp_path}/my_training.py:net")() == 7
    assert bench.find_factory("my_training:net")() == 7


# ------------------------------------------------------------------ measuring


def _check_wrong_sums(rank: int) -> list[bool]:
    parameter = nn.Parameter(torch.ones(3))
    unused = nn.Parameter(torch.ones(2))
    ranks = Ranks(dist.group.WORLD, torch.device("cpu"))
    answers = []
    for gradient in (1.5, 1.5 + 1e-4, 1.0, None):
        parameter.grad = None
        with GradientCheck([parameter, unused], ranks) as check:
            ((rank + 1) * parameter).sum().backward()
        # Only rank 1's is wrong, and all must say so.
        if rank == 1:
            parameter.grad = None if gradient is None else torch.full((3,), gradient)
        else:
            parameter.grad = torch.full((3,), 1.5)
        answers.append(check.gradients_are_averages())
    assert not parameter._backward_hooks
    return answers


def test_a_gradient_that_is_no_average_is_noticed_on_all_ranks():
    for answers in run_ranks(_check_wrong_sums):
        assert answers == [True, False, False, False]


def _sweep(rank: int, static_graph: bool) -> dict:
    module = nn.Sequential(nn.Linear(512, 256, bias=False), nn.Linear(256, 512, bias=False))
    for parameter in module.parameters():  # 0.5 MiB
        nn.init.constant_(parameter, 2)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    calls = []

    def loss(model: nn.Module) -> torch.Tensor:
        calls.append(type(model))
        return (rank + 1) * model(torch.ones(4, 512)).sum()

    visits = []
    workload = Workload(module, loss, {"static_graph": static_graph})
    arms = bench.caps(workload.parameters(), ["each", "0.001", "100", "one"])
    samples = bench.sweep(workload, arms, rounds=2, steps=2, after_visit=visits.append)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in module.parameters())

    # Nothing of the sweep is left on the module.
    model = brigade.DistributedDataParallel(module)
    loss(model).backward()
    # Four rows of 512 * 2 reach each weight of the last layer.
    average = torch.full((512, 256), 1.5 * 4 * 512 * 2)
    return {
        "labels": [[arm.label for arm in track.arms] for track in samples.tracks],
        "buckets": [len(track.bucket_bytes) for track in samples.tracks],
        "shape": [(len(t.rounds_ms), len(t.rounds_ms[0]), len(t.alone_ms)) for t in samples.tracks],
        "times": [samples.local_ms, *(t.rounds_ms for t in samples.tracks)],
        "right": [track.sums_right for track in samples.tracks],
        "visits": len(visits),
        "average": torch.equal(module[1].weight.grad, average),
        "unwrapped": sum(kind is nn.Sequential for kind in calls),
    }


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_sweep_times_each_plan_once_and_leaves_the_module_as_it_was(static_graph):
    first, second = run_ranks(_sweep, static_graph)
    assert first["labels"] == [["default", "100 MiB", "one"], ["one per parameter", "0.001 MiB"]]
    assert first["buckets"] == [1, 2]
    assert first["shape"] == [(2, 2, 2)] * 2
    assert first["right"] == [True, True]
    assert first["visits"] == 5 + 2 * 3
    assert first["average"]
    assert first["unwrapped"] == 2 * 3
    # Times are those of the slowest rank.
    assert first == second


def _bad_loss(rank: int) -> str:
    workload = Workload(nn.Linear(2, 2), lambda model: model(torch.ones(1, 2)))
    with pytest.raises(ValueError) as error:
        bench.sweep(workload, [])
    return str(error.value)


def test_a_loss_that_is_no_number_is_named():
    for text in run_ranks(_bad_loss):
        assert "must return a tensor of one element" in text
        assert "a tensor of 2 elements" in text


# ---------------------------------------------------------------- the command


def _command(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *(launcher if ranks else []), "-m", "brigade.bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_json(tmp_path):
    file = tmp_path / "figures.json"
    quick = ["--caps", "each,one", "--rounds", "1", "--steps", "1", "--json", str(file)]
    done = _command(f"{_EXAMPLE}:mlp_with_bucket_views", *quick)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    (title,) = (i for i, line in enumerate(lines) if line.startswith("MLP, bucket views: "))
    assert lines[title].startswith("MLP, bucket views: 16 gradients, 8.40 MB; step without")
    rows = lines[title + 2 : title + 5]
    assert [row.split("  ")[0] for row in rows] == ["default", "one per parameter", "one"]
    assert [row.endswith("right") for row in rows] == [True] * 3
    assert lines[title + 5].startswith("recommended: the default")
    assert "\r" not in done.stdout  # no bar where there is no terminal
    (model,) = json.loads(file.read_text())["models"]
    assert [arm["buckets"] for arm in model["arms"]] == [2, 16, 1]


def test_the_command_says_how_to_start_it_without_a_launcher():
    done = _command(f"{_EXAMPLE}:mlp", ranks=0)
    assert done.returncode == 2
    assert "RANK, WORLD_SIZE, MASTER_ADDR is not set" in done.stdout
    assert "torchrun" in done.stdout
    assert "Traceback" not in done.stdout
