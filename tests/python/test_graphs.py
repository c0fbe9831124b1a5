"""Outputs that the loss ignores or modifies, and logging data of a step's graph."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from cases import pairwise
from ranks import on_ranks
from training import CLASSES, Perceptron, expect_torchs_bits, gradients_of, inputs, loss_of


class Branches(nn.Module):
    """Runs one of several branches; the others' parameters are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.never = nn.Linear(2, 2)
        self.head = nn.Linear(3, 2)

    def forward(self, way, x):
        return self.head(self.ways[way](x)), self.ways[way](x).tanh()


class _Marked(torch.Tensor):
    """A tensor subclass in Python, such as a quantity with a unit."""


class _Marking(Branches):
    def forward(self, way, x):
        head, hidden = super().forward(way, x)
        return head.as_subclass(_Marked), hidden


@pairwise(
    views=[False, True],
    set_to_none=[True, False],
    make=[Branches, _Marking],
    copies=[True, False],
)
@on_ranks()
def test_the_loss_may_ignore_and_modify_outputs(rank, make, views, set_to_none, copies):
    """Rank 0's loss ignores the head in odd steps, rank 1's in the last three."""

    def run(wrapper):
        wrapped = wrapper(make(), find_unused_parameters=True, gradient_as_bucket_view=views)
        wrapped._set_ddp_sink_clone(copies)
        seen = []
        for step, x in enumerate(inputs(rank, 6)):
            wrapped.zero_grad(set_to_none=set_to_none)
            leaves_out = step >= 3 if rank == 1 else step % 2 == 1
            head, hidden = wrapped(0, x)
            assert type(head) is (_Marked if make is _Marking else torch.Tensor)
            if copies:
                hidden.mul_(2)
            loss_of(hidden if leaves_out else [head, hidden]).backward()
            seen += gradients_of(wrapped)
        return seen

    expect_torchs_bits(run)


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).requires_grad_(False)  # both backwards would reach it
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(x)
        return self.left(x).tanh(), self.right(x).tanh()


@on_ranks(timeout_s=30)
def test_a_forward_without_gradients_between_two_backwards_changes_no_reduction(rank):
    def run(wrapper):
        wrapped, seen = wrapper(_Heads()), []
        for x in inputs(rank, 3):
            wrapped.zero_grad()
            left, right = wrapped(x)
            left.sum().backward()
            with torch.no_grad():
                seen += [output.clone() for output in wrapped(x + 1)]
            right.square().sum().backward()
            seen += gradients_of(wrapped) + [buffer.clone() for buffer in wrapped.buffers()]
        return seen

    expect_torchs_bits(run)


# ---------------------------------------------------------------------- logging data


@on_ranks()
def test_logging_data_have_torchs_keys_times_order_and_errors(rank):
    wrapped = brigade.DistributedDataParallel(Perceptron(), bucket_cap_mb=1.5)
    expected = CLASSES["torch"](Perceptron(), bucket_cap_mb=1.5)._get_ddp_logging_data()
    data = wrapped._get_ddp_logging_data()
    assert {key: data.get(key) for key in expected} == expected
    assert data["rank"] == rank and data["world_size"] == dist.get_world_size()
    for x in inputs(rank, 3):
        loss_of(wrapped(x)).backward()
    data = wrapped._get_ddp_logging_data()
    for key in ("forward_compute", "backward_compute", "backward_comm"):
        assert data[f"avg_{key}_time"] >= 1
    assert data["has_rebuilt_buckets"] == 1
    assert data["prev_iteration_grad_ready_order_indices"].startswith("7, ")

    def hook(state, bucket):
        raise ValueError("the hook is out of order")

    wrapped.register_comm_hook(None, hook)
    assert "has_error" not in wrapped._get_ddp_logging_data()
    with pytest.raises(ValueError, match="out of order"):
        loss_of(wrapped(inputs(rank, 1)[0])).backward()
    data = wrapped._get_ddp_logging_data()
    assert data["has_error"] == 1 and data["iteration"] == 4
    assert "the hook is out of order" in data["error"]
