"""Frameworks that build the wrapper themselves train to torch's bits with brigade's class."""

import pathlib
import subprocess
import sys

import pytest

_PROGRAM = pathlib.Path(__file__).with_name("framework_program.py")
_PACKAGES = {
    "lightning": ["lightning"],
    "accelerate": ["accelerate", "transformers"],
    "trainer": ["accelerate", "transformers"],
}


@pytest.mark.parametrize("framework", _PACKAGES)
def test_a_framework_ends_in_torchs_bits_however_it_compiles(framework):
    for package in _PACKAGES[framework]:
        pytest.importorskip(package, reason=f"examples/python/requirements.txt: no {package}")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", "2", _PROGRAM, framework),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    for order in ("plain", "compiled inside", "compiled around"):
        for rank in range(2):
            assert f"rank {rank}: {framework}, {order}: torch's bits" in done.stdout
