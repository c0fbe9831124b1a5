"""`brigade bench`: workloads, measurements, the command."""

import json
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade
from brigade import bench, collectives, sharded_bench
from brigade.__main__ import main

from ranks import on_ranks, torchrun
from sharded_training import expect_equal_on_ranks

_EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "python" / "bench_mlp.py"


def test_a_factory_is_found_by_module_and_by_file(tmp_path, monkeypatch):
    (tmp_path / "my_training.py").write_text("import my_data\ndef net(): return my_data.NUMBER\n")
    (tmp_path / "my_data.py").write_text("NUMBER = 7\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert bench.find_factory(f"{tmp_path}/my_training.py:net")() == 7
    assert bench.find_factory("my_training:net")() == 7
    with pytest.raises(ValueError, match=r"found 'my_training\.py'"):
        bench.find_factory("my_training.py")
    with pytest.raises(ValueError, match="expected a function 'workload' in 'my_training:w"):
        bench.find_factory("my_training:workload")


def test_wrong_use_of_the_command_names_the_remedy(tmp_path, monkeypatch, capsys):
    (tmp_path / "alone.py").write_text("import torch\ndef net(): return torch.nn.Linear(2, 2)\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["brigade", "bench", f"{tmp_path}/alone.py:net"])
    monkeypatch.setattr(bench.dist, "init_process_group", lambda backend: None)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr().err
    assert printed.startswith("usage: torchrun --standalone --nproc-per-node 2 -m brigade bench\n")
    assert "RANK is not set: start with torchrun" in printed
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(TypeError, match=r"expected \(module, loss\) or .*, found Linear"):
        main()


def test_an_unknown_option_is_an_error():
    known = "find_unused_parameters, static_graph, gradient_as_bucket_view or name"
    with pytest.raises(TypeError, match=f"option 'bucket_cap_mb' is unknown.\nUse {known}"):
        bench.sweep(nn.Linear(2, 2), torch.sum, bucket_cap_mb=3)


@pytest.mark.parametrize("static_graph", [False, True])
@on_ranks()
def test_a_sweep_times_each_plan_once_and_keeps_the_module(rank, static_graph):
    module = nn.Sequential(nn.Linear(512, 256, bias=False), nn.Linear(256, 512, bias=False))
    for parameter in module.parameters():
        nn.init.constant_(parameter, 2)
    before = [parameter.detach().clone() for parameter in module.parameters()]

    def loss(model: nn.Module) -> torch.Tensor:
        return (rank + 1) * model(torch.ones(4, 512)).sum()

    sizes = ["each", "0.001", "100", "one"]
    table, data = bench.sweep(module, loss, sizes, rounds=2, steps=2, static_graph=static_graph)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in module.parameters())

    # The sweep leaves no hooks on the module.
    model = brigade.DistributedDataParallel(module)
    loss(model).backward()
    # Four rows of 512 * 2 reach each weight of the last layer.
    average = torch.full((512, 256), 1.5 * 4 * 512 * 2)
    assert torch.equal(module[1].weight.grad, average)
    assert [(arm["cap"].replace(", planned", ""), arm["buckets"]) for arm in data["arms"]] == [
        ("default, 100 MiB, one", 1),
        ("each, 0.001 MiB", 2),
    ]
    assert sum("planned" in arm["cap"] for arm in data["arms"]) == 1
    # Two ways to add the same numbers.
    assert all(arm["predicted_ms"] >= data["bound_ms"] * (1 - 1e-9) for arm in data["arms"])
    assert table.startswith("Sequential: 2 parameters, 1.00 MiB\n")
    assert "\nrecommended: " in table
    expect_equal_on_ranks(table)  # ranks agree on the slowest rank's times


@on_ranks()
def test_collectives_are_timed_by_operation_size_and_number_of_pieces(rank, monkeypatch):
    monkeypatch.setattr(collectives, "_SIZES", [1 << 10, 1 << 12])
    monkeypatch.setattr(collectives, "_PIECES", [4])
    found = collectives.measure(torch.device("cpu"), rounds=2)
    operations = {entry["operation"] for entry in found}
    assert len(found) == 3 * len(operations) == 18
    assert {"all-gather, uneven", "sums in rank order"} < operations
    assert {(entry["bytes"], entry["pieces"]) for entry in found} == {
        (1 << 10, 1),
        (1 << 12, 1),
        (1 << 12, 4),
    }
    expect_equal_on_ranks(found)
    lines = collectives.table(found).splitlines()
    assert lines[1].split() == ["1", "KiB", "4", "KiB", "in", "4"]
    assert len(lines) == 2 + len(operations)


class _Block(nn.Linear):
    pass


@on_ranks()
def test_settings_of_sharded_training_take_turns(rank):
    def workload():
        model = nn.Sequential(*(_Block(4, 4) for _ in range(4)))
        return model, lambda model: model(torch.ones(2, 4)).sum()

    figures = sharded_bench.measure(workload, "_Block", rounds=2, steps=1)
    assert figures["units"] == 4
    expect_equal_on_ranks(figures)
    names = [arm["name"] for arm in figures["arms"]]
    assert names[0] == "reshard_after_forward=True"
    assert "reshard_after_forward=False, 2 modules per unit" in names
    assert all(len(arm["rounds_ms"]) == 2 for arm in figures["arms"])
    assert not any(arm["decided"] for arm in figures["arms"])  # two rounds are too few
    assert "\nrecommended: " in sharded_bench.table(figures)
    with pytest.raises(ValueError, match=r"found 'Block'.\nThe model has Sequential, _Block"):
        sharded_bench.measure(workload, "Block", rounds=2, steps=1)


def test_a_setting_is_recommended_if_chance_is_unlikely():
    default = [10.0] * 8
    decided = sharded_bench._is_decided
    assert decided([9.0] * 8, default, candidates=7)  # 7 / 256
    assert not decided([9.0] * 7 + [11.0], default, candidates=7)
    assert not decided([9.0] * 8, default, candidates=15)

    def table(is_decided: bool) -> str:
        arms = [
            {"name": name, "step_ms": {"median": 10.0}, "over_default": dict.fromkeys(keys, ratio)}
            | {"decided": is_decided}
            for name, ratio in (("kept", 1.0), ("other", 0.8), ("torch's", 0.1))
        ]
        figures = {"parameters": 1, "units": 1, "rounds_taken": 8, "steps": 1, "arms": arms}
        return sharded_bench.table({"name": "Net", **figures})

    keys = ("p25", "median", "p75")
    assert table(True).endswith("recommended: other: 20.0% less per step\n")
    assert table(False).endswith("recommended: keep kept (no setting is reliably faster)\n")


@on_ranks(1)
def test_an_invalid_size_or_a_single_rank_is_an_error(rank):
    for size in ("x", "-1", "0", "nan", ""):
        with pytest.raises(ValueError, match="expected a size of more than 0 MiB"):
            bench.sweep(nn.Linear(2, 2), torch.sum, [size])
    with pytest.raises(ValueError, match="expected at least 2 ranks, found 1"):
        bench.sweep(nn.Linear(2, 2), torch.sum)


@on_ranks()
def test_errors_name_the_shape_of_the_loss_and_an_unused_parameter(rank):
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "spare": nn.Linear(2, 2)})
    module["used"].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"expected a loss of one element, found shape \[2\]"):
        bench.sweep(module, lambda model: model["used"](torch.ones(2)))
    with pytest.raises(RuntimeError, match=r"spare\.weight"):
        bench.sweep(module, lambda model: model["used"](torch.ones(2)).sum())
    dist.destroy_process_group()  # closed by the failed sweep


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_json(tmp_path):
    file = tmp_path / "figures.json"
    quick = ["--caps", "each,one", "--rounds", "1", "--steps", "1", "--json", str(file)]
    output = torchrun("-m", "brigade", "bench", f"{_EXAMPLE}:mlp_with_bucket_views", *quick)
    lines = output.splitlines()
    (title,) = (i for i, line in enumerate(lines) if line.startswith("MLP, bucket views: "))
    assert lines[title].endswith(": 16 parameters, 8.02 MiB")
    rows = lines[title + 3 : title + 6]
    assert [row.split(" ")[0].rstrip("*") for row in rows] == ["default", "each", "one"]
    assert max(map(len, lines[title + 2 : title + 7])) <= 80
    assert "recommended: keep the default (no cap is reliably faster)" in lines
    assert any(line.startswith("  too few rounds (1) to decide between") for line in lines)
    (model,) = json.loads(file.read_text())["models"]
    assert model["ready"][0]["name"] == "14.bias"
    again = torchrun(
        "-m", "brigade", "bench", f"{_EXAMPLE}:mlp_with_bucket_views", *quick, "--resume"
    )
    assert again.splitlines()[-2:] == lines[-2:]
    assert [arm["buckets"] for arm in model["arms"]][:3] == [2, 16, 1]
