"""Names that the programs of docs/ use without a definition: a module, data, a loss.

The environment variable `MY_FAULT` selects a fault in the third batch of rank 1, which happens
once: the rank "dies", is "late", or its backward "raises".
"""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Iterator

import torch
from torch import nn

FEATURES = 4
RANK = int(os.environ.get("RANK", "0"))
_FAULTY_BATCH = 2
_loads = 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return Net()


def criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs.float(), targets)


def batches(rank: int = RANK, count: int = 8) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields batches that differ between ranks and are equal in each run."""
    generator = torch.Generator().manual_seed(rank)
    for index in range(count):
        inputs = torch.randn(6, FEATURES, generator=generator)
        if rank == 1 and index == _FAULTY_BATCH:
            inputs = _faulty(inputs)
        yield inputs, inputs[:, :2].square()


def save(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, f"new.{RANK}")
    os.replace(f"new.{RANK}", f"checkpoint.{RANK}")


def load(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the file of the highest step of all ranks. Returns the next step."""
    global _loads
    _loads += 1
    if _loads == 2:
        _gave_up().touch()
    states = [torch.load(file) for file in pathlib.Path().glob("checkpoint.*")]
    if not states:
        return 0
    state = max(states, key=lambda state: state["step"])
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _faulty(inputs: torch.Tensor) -> torch.Tensor:
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return inputs
    match os.environ.pop("MY_FAULT", ""):
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "late":
            while not _gave_up().exists():  # until rank 0 loads again
                time.sleep(0.01)
        case "raises":
            inputs.requires_grad_().register_hook(_raise)
    return inputs


def _gave_up() -> pathlib.Path:
    return pathlib.Path("gave_up")


def _raise(gradient: torch.Tensor) -> None:
    raise ValueError("a bad sample")
