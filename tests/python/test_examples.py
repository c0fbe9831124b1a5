"""Runs the programs of examples/python on two ranks, if their packages are installed."""

import pathlib
import re

import pytest

from ranks import torchrun

_FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "python"


def _run(name: str, *arguments: str) -> str:
    return torchrun(_FOLDER / name, *arguments)


def _need(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"examples/python/requirements.txt: no {package}")


def test_a_resnet_has_the_weights_of_torchs_class():
    _need("sklearn", "torchvision", "tqdm")
    output = _run("train_resnet.py", "--ddp", "both", "--steps", "2", "--image-size", "8")
    assert "weights equal bit for bit" in output


def test_lightning_uses_brigades_class():
    _need("lightning", "sklearn")
    output = _run("train_lightning.py", "--epochs", "1")
    for rank in range(2):
        name = "brigade.distributed_data_parallel.DistributedDataParallel"
        assert f"rank {rank}: {name}" in output


@pytest.mark.slow
def test_a_gpt_has_equal_weights_for_each_strategy_and_when_resumed(tmp_path):
    _need("tqdm")
    small = ["--size", "32", "--blocks", "2", "--batch-size", "2"]
    in_folder = ["--folder", str(tmp_path), "--save-every", "2", *small]
    _run("train_gpt.py", "--steps", "2", *in_folder)
    outputs = [_run("train_gpt.py", "--steps", "4", *in_folder)]
    assert "resuming after step 2" in outputs[0]
    for strategy in ("grad", "none"):
        outputs.append(_run("train_gpt.py", "--steps", "4", "--strategy", strategy, *small))
    weights = {re.search(r"weights (\w{16})", output).group(1) for output in outputs}
    assert len(weights) == 1, outputs
