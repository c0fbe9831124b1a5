"""fully_shard moves modules to their mesh's device, as torch's does.

These tests need no device; test_on_cuda.py moves modules to CUDA.
"""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

import brigade
from brigade import _prepare_parameters, _sharded_units

from ranks import on_ranks


def _group_of(*types):
    """Returns a mock group with backends for these device types."""
    group = mock.Mock(bound_device_id=None)
    group._device_types = [torch.device(t) for t in types]
    return group


def _moves(found, group, device_type):
    with (
        mock.patch("torch.get_device_module") as module,
        mock.patch.object(_prepare_parameters, "device_of", return_value=torch.device("cuda", 2)),
    ):
        module.return_value.current_device.return_value = 1
        return _prepare_parameters._device_for(torch.device(found), group, device_type)


@pytest.mark.parametrize(
    ("found", "types", "of_mesh", "becomes"),
    [
        ("cpu", ("cpu",), None, "cpu"),
        ("cpu", ("cpu", "cuda"), None, "cpu"),  # torch moves it
        ("cuda:3", ("cpu", "cuda"), None, "cuda:3"),
        ("cpu", ("cuda",), None, "cuda:2"),  # no backend: moves to the group's device
        ("cuda:3", ("cpu",), None, "cuda:3"),  # an error later
        ("cpu", ("cpu", "cuda"), "cuda", "cuda:1"),  # to the current device
        ("cuda:3", ("cuda",), "cuda", "cuda:3"),  # torch moves it to the current device
        ("cuda:3", ("cpu", "cuda"), "cpu", "cpu"),
        ("cpu", ("cpu",), "cpu", "cpu"),
    ],
)
def test_the_target_device(found, types, of_mesh, becomes):
    assert _moves(found, _group_of(*types), of_mesh) == torch.device(becomes)


@on_ranks()
def test_the_moved_tensors(rank):
    """Inner units' tensors, ignored parameters and meta tensors do not move."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(2, 2)
            self.below = nn.Linear(2, 2)
            self.ignored = nn.Parameter(torch.ones(2))
            self.tied = self.own.weight
            self.on_meta = nn.Parameter(torch.empty(2, device="meta"))
            self.register_buffer("buffer", torch.ones(2))

    module = Inner()
    brigade.fully_shard(module.below)
    before = {name: p for name, p in module.named_parameters()}
    moved = []

    def other(device, group, device_type):
        assert device_type == "cpu"
        moved.append(device)
        return device

    with mock.patch.object(_prepare_parameters, "_device_for", other):
        brigade.fully_shard(
            module,
            mesh=init_device_mesh("cpu", (2,)),
            ignored_params={module.ignored, module.on_meta},
        )
    assert moved == [torch.device("cpu")] * 3  # the weight, its bias and the buffer
    assert module.ignored is before["ignored"] and module.on_meta is before["on_meta"]


@on_ranks()
def test_a_move_that_fails_on_one_rank_fails_on_all(rank):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(2))
            self.block = brigade.fully_shard(nn.Linear(2, 2))

    for module in (Rotary(), nn.Linear(2, 2)):
        elsewhere = mock.patch.object(
            _prepare_parameters, "_device_for", lambda *_: torch.device("cpu", 0)
        )
        move = mock.patch.object(
            _sharded_units, "move", side_effect=RuntimeError("no room") if rank == 1 else None
        )
        with elsewhere, move, pytest.raises((RuntimeError, ValueError), match="no room"):
            brigade.fully_shard(module)


@pytest.mark.parametrize("is_parameter", [True, False])
def test_subclasses_move_with_their_inner_tensors(is_parameter):
    pair = TwoTensor(torch.ones(2), torch.ones(2))
    tensor = nn.Parameter(pair, requires_grad=False) if is_parameter else pair
    _prepare_parameters.move(tensor, torch.device("meta"))
    assert isinstance(tensor, TwoTensor) and tensor.is_meta and tensor.a.is_meta
    assert isinstance(tensor, nn.Parameter) == is_parameter
