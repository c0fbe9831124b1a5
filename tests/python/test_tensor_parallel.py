"""Data parallelism over one mesh dimension, tensor parallelism over the other."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks
from training import expect_torchs_bits

_COLUMNS = 2


def _split(mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _wrap(wrapper, mesh, given, options):
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    model = _split(mesh["model"])
    if given == "device_mesh":
        return wrapper(model, device_mesh=mesh["data"], **options)
    _pre_dp_module_transform(model)
    return wrapper(model, process_group=mesh["data"].get_group(), **options)


@pytest.mark.parametrize("given", ["device_mesh", "process_group"])
@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True, "gradient_as_bucket_view": True}],
    ids=["default", "find_unused", "static_graph"],
)
@on_ranks(2 * _COLUMNS)
def test_a_tensor_parallel_module_has_torchs_bits(rank, given, options):
    mesh = dist.init_device_mesh("cpu", (2, _COLUMNS), mesh_dim_names=("data", "model"))
    ours = []

    def run(wrapper):
        wrapped = _wrap(wrapper, mesh, given, options)
        local = list(wrapped.parameters())  # torch removes them from the module in forward
        optimizer = torch.optim.SGD(local, lr=0.125, momentum=0.5)
        seen = []
        for step in range(4):
            x = torch.full((2, 4), float(rank // _COLUMNS + step))
            optimizer.zero_grad()
            wrapped(x).square().sum().backward()
            seen += [p.grad.clone() for p in local]
            optimizer.step()
        ours.append(local[0].tolist())
        return seen + [p.detach().clone() for p in local]

    expect_torchs_bits(run)
    of_ranks = [None] * 2 * _COLUMNS
    dist.all_gather_object(of_ranks, ours[0])
    assert of_ranks[0] == of_ranks[2] != of_ranks[1] == of_ranks[3]


@on_ranks()
def test_the_error_for_tensor_parallel_parameters_asks_for_the_mesh(rank):
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    with pytest.raises(RuntimeError, match=r"'0\.weight' is a DTensor.*\n.*device_mesh"):
        brigade.DistributedDataParallel(
            _split(mesh["model"]), process_group=mesh["data"].get_group()
        )
