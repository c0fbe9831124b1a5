"""Frameworks that construct the wrapper themselves: same bits with brigade's class."""

import pathlib

import pytest
import torch

from ranks import torchrun

_FOLDER = pathlib.Path(__file__).parent
_PACKAGES = {
    "lightning": ["lightning"],
    "accelerate": ["accelerate", "transformers"],
    "accelerate-cuda": ["accelerate", "transformers"],
    "trainer": ["accelerate", "transformers"],
}


def _run(program: str, framework: str, world_size: int = 2) -> str:
    for package in _PACKAGES[framework]:
        pytest.importorskip(package, reason=f"examples/python/requirements.txt: no {package}")
    return torchrun(_FOLDER / program, framework, world_size=world_size)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "accelerate", "trainer"])
def test_a_framework_has_torchs_bits_in_each_order_of_compiling(framework):
    output = _run("framework_program.py", framework)
    for order in ("plain", "compiled inside", "compiled around"):
        for rank in range(2):
            assert f"rank {rank}: {framework}, {order}: torch's bits" in output


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_a_sharding_framework_has_torchs_losses(framework):
    if framework == "lightning":
        pytest.importorskip("transformers", reason="examples/python/requirements.txt")
    output = _run("sharded_framework_program.py", framework)
    for rank in range(2):
        assert f"rank {rank}: {framework}: " in output


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_accelerate_shards_on_a_device():
    output = _run("sharded_framework_program.py", "accelerate-cuda", world_size=1)
    assert "rank 0: accelerate-cuda: " in output
