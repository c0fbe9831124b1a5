"""`brigade simulate`: requests, curves, recorded sweeps, the command line."""

import json
import re
import sys

import pytest
import torch
from torch import nn

import brigade
from brigade import simulation
from brigade.__main__ import main

from ranks import on_ranks

_REQUEST = {
    "model": "bert-base",
    "cluster": {"hosts": 2, "device": "a100", "inside": "nvlink3", "between": "hdr"},
    "strategy": {"kind": "fsdp2"},
}


def run(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["brigade", "simulate", *arguments])
    main()


def test_a_request_and_the_command_give_the_same_step(tmp_path, monkeypatch, capsys):
    file = tmp_path / "step.json"
    hosts = ("--hosts", "2", "--device", "a100", "--inside", "nvlink3", "--between", "hdr")
    run(monkeypatch, "bert-base", "--strategy", "fsdp2", *hosts, "--json", str(file))
    written = json.loads(file.read_text())
    assert written["request"] == _REQUEST
    assert written["result"] == simulation.simulate(_REQUEST)
    printed = capsys.readouterr().out
    assert printed.startswith(f"bert-base, fsdp2: step {1e3 * written['result']['step_s']:.4g} ms")
    assert [row["gpus"] for row in written["curve"]] == [1 << power for power in range(10)]
    sharded = written["shard_ranks_curve"]
    assert [row["shard_ranks"] for row in sharded] == [1, 2, 4, 8, 16]
    # A larger share of the model per rank needs more memory and crosses hosts less.
    assert sharded[0]["memory_bytes"] > sharded[-1]["memory_bytes"]
    assert written["curve"][4]["step_s"] == written["result"]["step_s"] == sharded[-1]["step_s"]


def test_numbers_of_gpus_whose_memory_is_too_small_are_left_out(tmp_path, monkeypatch, capsys):
    file = tmp_path / "step.json"
    run(monkeypatch, "llama-7b", "--hosts", "4", "--device", "h100", "--json", str(file))
    written = json.loads(file.read_text())
    assert written["curve"][0]["gpus"] > 1
    printed = capsys.readouterr().out.splitlines()
    too_large = [row["shard_ranks"] for row in written["shard_ranks_curve"] if not row["fits"]]
    assert too_large[0] == 1
    assert [int(line.split()[0]) for line in printed if line.endswith("does not fit")] == too_large


def test_a_recorded_sweep_is_predicted_with_its_own_all_reduces(tmp_path, monkeypatch, capsys):
    file = tmp_path / "sweep.json"
    ready = [
        {"parameter": 1, "name": "b", "bytes": 4_000_000, "ready_ms": 10.0},
        {"parameter": 0, "name": "a", "bytes": 8_000_000, "ready_ms": 30.0},
    ]
    points = [{"bytes": 1000, "seconds": 0.001}, {"bytes": 16_000_000, "seconds": 0.016}]
    sweep = {
        "name": "Net",
        "ranks": 2,
        "forward_ms": 20.0,
        "ready": ready,
        "cost": {"points": points},
    }
    file.write_text(json.dumps({"kind": "sweep", "models": [sweep]}))
    run(monkeypatch, str(file), "--json", str(tmp_path / "step.json"))
    step = json.loads((tmp_path / "step.json").read_text())
    # Forward, backward, and the last bucket.
    assert step["result"]["step_s"] == pytest.approx(0.020 + 0.030 + 0.0085, rel=1e-3)
    assert step["curve"] == []  # the all-reduces are those of 2 ranks
    run(monkeypatch, str(file), "--strategy", "ddp", "--hosts", "2", "--between", "ethernet1")
    assert "GPUs   step ms" in capsys.readouterr().out


@pytest.mark.parametrize("depth", [0, 1, 2])
@on_ranks()
def test_the_predicted_memory_is_that_of_a_sharded_model(rank, depth):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    for layer in model:
        brigade.fully_shard(layer, prefetch_depth=depth)
    brigade.fully_shard(model, prefetch_depth=depth)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
    layers = [{"name": str(i), "tensors": [64 * 64, 64], "forward_s": 0.1} for i in range(6)]
    strategy = {"kind": "brigade", "parameter_bytes": 4, "gradient_bytes": 4}
    memory = simulation.simulate(
        {
            "model": {"name": "Net", "layers": layers},
            "cluster": {"gpus_per_host": 2, "device": {}},
            "strategy": strategy | {"prefetch_depth": depth},
        }
    )["memory"]
    shards = sum(p.to_local().nbytes for p in model.parameters())
    assert memory["parameters"] == memory["gradients"] == shards
    peak = re.search(r"peak ([\d.]+) KiB", model.explain())
    assert memory["unsharded"] == 1024 * float(peak[1])


def test_options_override_a_request(tmp_path, monkeypatch):
    request, file = tmp_path / "request.json", tmp_path / "step.json"
    request.write_text(json.dumps(_REQUEST))
    run(monkeypatch, "--request", str(request), "--json", str(file))
    assert json.loads(file.read_text())["request"] == _REQUEST
    options = ("--strategy", "ddp", "--gpus-per-host", "6", "--json", str(file))
    run(monkeypatch, "gpt2", "--request", str(request), *options)
    written = json.loads(file.read_text())
    assert written["request"]["model"] == "gpt2"
    assert written["request"]["strategy"] == {"kind": "ddp"}
    counts = [row["gpus"] for row in written["curve"]]
    assert counts == [1, 2, 4, 6, 12, 24, 48, 96, 192, 384]
    request.write_text("[]")
    with pytest.raises(SystemExit):
        run(monkeypatch, "--request", str(request))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["llama"], r"expected one of resnet50, .* found 'llama'"),
        (["gpt2", "--hosts", "-1"], "hosts: expected an integer .* found -1"),
        (["nothing.json"], "nothing.json: expected the JSON file of a sweep"),
        (["gpt2", "--request", "nothing"], "--request: expected a JSON file"),
        (["llama-405b", "--checkpoint", "fit"], "GB are missing"),
    ],
)
def test_bad_input_is_named_and_nothing_is_printed(monkeypatch, capsys, arguments, text):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("brigade simulate: ")
    assert re.search(text, printed.err), printed.err
