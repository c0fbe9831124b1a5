"""Outputs that the loss leaves out or changes, and what is told of a step's graph."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from cases import pairwise
from ranks import on_ranks
from training import CLASSES, Perceptron, expect_torchs_bits, gradients_of, inputs, loss_of


class Branches(nn.Module):
    """Goes the way it is told: parameters of the other ways are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.never = nn.Linear(2, 2)
        self.head = nn.Linear(3, 2)

    def forward(self, way, x):
        return self.head(self.ways[way](x)), self.ways[way](x).tanh()


class _Marked(torch.Tensor):
    """A subclass in Python, as quantities with units are."""


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
def test_the_loss_may_leave_outputs_out_and_change_them(rank, make, views, set_to_none, copies):
    """Rank 0 leaves the head out in odd steps, rank 1 in the last three."""

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


@on_ranks(1)
def test_outputs_keep_their_structure(rank):
    class Nested(Branches):
        def forward(self, x):
            head, way = super().forward(0, x)
            return {"head": [head, (way, x)], "constant": 3}

    wrapped = brigade.DistributedDataParallel(Nested(), find_unused_parameters=True)
    x = inputs(rank, 1)[0]
    output = wrapped(x)
    assert output["constant"] == 3 and output["head"][1][1] is x
    loss_of(output["head"][1][0]).backward()
    assert wrapped.module.head.weight.grad is None


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).requires_grad_(False)  # both backwards would go through it
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(x)
        return self.left(x).tanh(), self.right(x).tanh()


@on_ranks(timeout_s=30)
def test_a_forward_without_gradients_between_two_backwards_leaves_their_reduction_alone(rank):
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


# ---------------------------------------------------------------------- what is told


@on_ranks()
def test_what_the_search_for_unused_parameters_has_found_is_told(rank):
    wrapped = brigade.DistributedDataParallel(Branches(), find_unused_parameters=True)
    x = inputs(rank, 1)[0]
    for _ in range(2):
        loss_of(wrapped(0, x)).backward()
        assert wrapped.reducer._ddp_graph_static()
    loss_of(wrapped(rank, x)).backward()
    used = wrapped.reducer._get_local_used_map()
    assert used.dtype == torch.int32
    assert used.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 2, 2]  # by how many ranks
    unused = [wrapped.module.never, wrapped.module.ways[1 - rank], wrapped.module.ways[2]]
    unused_bytes = sum(4 * p.numel() for module in unused for p in module.parameters())
    wrapped(rank, x)
    assert wrapped._get_ddp_logging_data()["unused_parameter_size"] == unused_bytes
    assert rank == 0 or not wrapped.reducer._ddp_graph_static()


@on_ranks()
def test_missing_gradients_are_named_with_the_rank_in_lines_that_tools_read(rank):
    wrapped = brigade.DistributedDataParallel(Branches())
    x = inputs(rank, 1)[0]
    loss_of(wrapped(0, x)).backward()
    words = rf"(?s)rank {rank}.*'ways.1.weight'.*did not receive grad for rank {rank}: 2, 3, 4"
    with pytest.raises(RuntimeError, match=words) as error:
        wrapped(0, x)
    assert "'ways.0.weight'" not in str(error.value)
    assert "ways.2.bias" in wrapped._get_ddp_logging_data()["error"]


@on_ranks(1)
def test_a_static_graph_is_declared_before_training(rank):
    wrapped = brigade.DistributedDataParallel(Perceptron())
    loss_of(wrapped(inputs(rank, 1)[0])).backward()
    with pytest.raises(RuntimeError, match="iteration 1"):
        wrapped._set_static_graph()
    assert "iteration 1" in wrapped._get_ddp_logging_data()["error"]


@on_ranks()
def test_logging_data_are_torchs_and_tell_times_order_and_errors(rank):
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
