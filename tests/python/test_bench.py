"""brigade.bench: what users give, what is measured, the command."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

import brigade
from brigade import bench
from brigade.bench import Workload

from ranks import on_ranks, torchrun
from sharded_training import expect_alike

_EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "python" / "bench_mlp.py"


# ---------------------------------------------------------- what users give


def test_a_factory_gives_a_pair_or_a_workload():
    module = nn.Linear(2, 2)
    pair = bench.make_workload(lambda: (module, torch.sum))
    assert (pair.module, pair.loss, pair.title()) == (module, torch.sum, "Linear")
    named = Workload(module, torch.sum, {"static_graph": True}, name="tiny")
    assert bench.make_workload(lambda: named) is named
    with pytest.raises(TypeError, match="must return a pair"):
        bench.make_workload(lambda: module)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3, torch.sum), "not wrapped yet, got int"),
        ((nn.Linear(1, 1), None), "must be a function of the module, got None"),
        ((nn.ReLU(), torch.sum), "ReLU has no parameter"),
        ((nn.Linear(1, 1), torch.sum, {"bucket_cap_mb": 3}), "static_graph; got bucket_cap_mb"),
    ],
)
def test_a_workload_that_can_not_be_timed_is_refused(arguments, text):
    with pytest.raises((TypeError, ValueError), match=text):
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


@pytest.mark.parametrize("static_graph", [False, True])
@on_ranks()
def test_a_sweep_times_each_plan_once_and_leaves_the_module_as_it_was(rank, static_graph):
    module = nn.Sequential(nn.Linear(512, 256, bias=False), nn.Linear(256, 512, bias=False))
    for parameter in module.parameters():  # 0.5 MiB
        nn.init.constant_(parameter, 2)
    before = [parameter.detach().clone() for parameter in module.parameters()]

    def loss(model: nn.Module) -> torch.Tensor:
        return (rank + 1) * model(torch.ones(4, 512)).sum()

    visits = []
    workload = Workload(module, loss, {"static_graph": static_graph})
    sizes = ["each", "0.001", "100", "one"]
    found = bench.sweep(workload, sizes, rounds=2, steps=2, after_visit=visits.append)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in module.parameters())

    # Nothing of the sweep is left on the module.
    model = brigade.DistributedDataParallel(module)
    loss(model).backward()
    # Four rows of 512 * 2 reach each weight of the last layer.
    average = torch.full((512, 256), 1.5 * 4 * 512 * 2)
    assert torch.equal(module[1].weight.grad, average)
    assert [(arm["cap"], arm["buckets"]) for arm in found.data["arms"]] == [
        ("default, 100 MiB, one", 1),
        ("one per parameter, 0.001 MiB", 2),
    ]
    assert found.all_right
    assert len(visits) == 5 + 2 * 3
    assert found.table.startswith("Sequential: 2 gradients, 1.05 MB")
    assert "\nrecommended: " in found.table
    expect_alike(found.table)  # times are those of the slowest rank


@on_ranks()
def test_a_loss_that_is_no_number_is_named(rank):
    workload = Workload(nn.Linear(2, 2), lambda model: model(torch.ones(1, 2)))
    words = "(?s)must return a tensor of one element.*a tensor of 2 elements"
    with pytest.raises(ValueError, match=words):
        bench.sweep(workload)


@on_ranks(1)
def test_a_size_that_is_none_is_refused(rank):
    workload = Workload(nn.Linear(2, 2), torch.sum)
    for size in ("x", "-1", "0", "nan", ""):
        with pytest.raises(ValueError, match="expected a size in MiB above 0"):
            bench.sweep(workload, [size])


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_json(tmp_path):
    file = tmp_path / "figures.json"
    quick = ["--caps", "each,one", "--rounds", "1", "--steps", "1", "--json", str(file)]
    output = torchrun("-m", "brigade.bench", f"{_EXAMPLE}:mlp_with_bucket_views", *quick)
    lines = output.splitlines()
    (title,) = (i for i, line in enumerate(lines) if line.startswith("MLP, bucket views: "))
    assert lines[title].startswith("MLP, bucket views: 16 gradients, 8.40 MB; backward computed")
    rows = lines[title + 2 : title + 5]
    assert [row.split("  ")[0] for row in rows] == ["default", "one per parameter", "one"]
    assert [row.endswith("right") for row in rows] == [True] * 3
    assert lines[title + 5].startswith("recommended: the default")
    assert "\r" not in output  # no bar where there is no terminal
    (model,) = json.loads(file.read_text())["models"]
    assert [arm["buckets"] for arm in model["arms"]] == [2, 16, 1]


def test_the_command_says_how_to_start_it_without_a_launcher():
    command = [sys.executable, "-m", "brigade.bench", f"{_EXAMPLE}:mlp"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "RANK, WORLD_SIZE, MASTER_ADDR is not set" in done.stderr
    assert "torchrun" in done.stderr and "Traceback" not in done.stderr
