"""Unused parameters, static graphs, logging data."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import brigade

from cases import pairwise
from ranks import on_ranks
from training import CLASSES, Perceptron, assert_equal, assert_same_bits, both, inputs, loss_of


class Branches(nn.Module):
    """Goes the way it is told: parameters of the other ways are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.never = nn.Linear(2, 2)
        self.head = nn.Linear(3, 2)

    def forward(self, way_and_x):
        way, x = way_and_x
        return self.head(self.ways[way](x)), self.ways[way](x)


@pairwise(
    views=[False, True],
    set_to_none=[True, False],
    ways=[([0, 1, 2, 0], [0, 1, 2, 0]), ([0, 1, 2, 0], [1, 1, 0, 2]), ([0, 0, 0, 0], [2, 2, 2, 2])],
)
@on_ranks()
def test_unused_parameters_train_to_the_same_bits(rank, ways, views, set_to_none):
    batches = list(zip(ways[rank], inputs(rank, len(ways[rank])), strict=True))
    assert_same_bits(
        both(
            Branches,
            batches,
            set_to_none=set_to_none,
            find_unused_parameters=True,
            gradient_as_bucket_view=views,
        )
    )


@on_ranks()
def test_a_parameter_that_no_rank_uses_keeps_its_gradient(rank):
    wrapped = brigade.DistributedDataParallel(Branches(), find_unused_parameters=True)
    output = wrapped((rank, inputs(rank, 1)[0]))
    loss_of(output).backward()
    used = wrapped.reducer._get_local_used_map()
    assert used.dtype == torch.int32
    assert used.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 2, 2]  # by how many ranks
    assert wrapped.module.never.weight.grad is None
    assert wrapped.module.ways[2].weight.grad is None
    assert wrapped.module.ways[1 - rank].weight.grad is not None


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks()
def test_the_loss_may_leave_outputs_out(rank, views, set_to_none):
    """Rank 0 leaves the head out in odd steps, rank 1 in the last three."""
    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        wrapped = wrapper(Branches(), find_unused_parameters=True, gradient_as_bucket_view=views)
        seen = []
        for step, x in enumerate(inputs(rank, 6)):
            wrapped.zero_grad(set_to_none=set_to_none)
            leaves_out = step >= 3 if rank == 1 else step % 2 == 1
            head, way = wrapped((0, x))
            loss_of(way if leaves_out else [head, way]).backward()
            seen += [None if p.grad is None else p.grad.clone() for p in wrapped.parameters()]
        results[name] = seen
    assert_equal(results["brigade"], results["torch"])


@on_ranks(1)
def test_outputs_keep_their_structure_and_may_be_changed_in_place(rank):
    class Nested(Branches):
        def forward(self, x):
            head, way = super().forward((0, x))
            return {"head": [head, (way, x)], "constant": 3}

    wrapped = brigade.DistributedDataParallel(Nested(), find_unused_parameters=True)
    x = inputs(rank, 1)[0]
    output = wrapped(x)
    assert output["constant"] == 3 and output["head"][1][1] is x
    output["head"][1][0].relu_()  # an output may be changed in place
    loss_of(output["head"][1][0]).backward()
    assert wrapped.module.head.weight.grad is None


@on_ranks()
def test_missing_gradients_are_named_with_the_rank(rank):
    wrapped = brigade.DistributedDataParallel(Branches())
    x = inputs(rank, 1)[0]
    loss_of(wrapped((0, x))).backward()
    with pytest.raises(RuntimeError, match=rf"rank {rank}.*'ways.1.weight'") as error:
        wrapped((0, x))
    assert "'ways.0.weight'" not in str(error.value)
    assert "ways.2.bias" in wrapped._get_ddp_logging_data()["error"]


@on_ranks()
def test_every_missing_gradient_is_in_the_lines_that_tools_read(rank):
    wrapped = brigade.DistributedDataParallel(nn.ModuleList(nn.Linear(1, 1) for _ in range(9)))
    wrapped.module.forward = lambda x: wrapped.module[8](x)
    wrapped(torch.ones(1, 1)).sum().backward()
    with pytest.raises(
        RuntimeError, match=f"did not receive grad for rank {rank}: 0, 1, 2"
    ) as error:
        wrapped(torch.ones(1, 1))
    assert all(f"{i}.weight" in str(error.value) for i in range(8))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.a, self.b, self.unused = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(1, 1)

    def forward(self, x):
        y = checkpoint(self.a, x.requires_grad_(), use_reentrant=self.reentrant)
        return checkpoint(
            self.b,
            checkpoint(self.a, y, use_reentrant=self.reentrant),
            use_reentrant=self.reentrant,
        )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("views", [False, True])
@on_ranks()
def test_checkpointed_layers_train_under_a_static_graph(rank, reentrant, views):
    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        wrapped = wrapper(Checkpointed(reentrant), static_graph=True, gradient_as_bucket_view=views)
        seen = []
        for x in inputs(rank, 4):
            wrapped.zero_grad()
            loss_of(wrapped(x)).backward()
            seen += [None if p.grad is None else p.grad.clone() for p in wrapped.parameters()]
        results[name] = seen
    assert_equal(results["brigade"], results["torch"])


@on_ranks(1)
def test_a_static_graph_is_declared_before_training(rank):
    wrapped = brigade.DistributedDataParallel(Perceptron())
    loss_of(wrapped(inputs(rank, 1)[0])).backward()
    with pytest.raises(RuntimeError, match="iteration 1"):
        wrapped._set_static_graph()
    assert "iteration 1" in wrapped._get_ddp_logging_data()["error"]


@on_ranks()
def test_a_graph_that_never_changes_is_recognised(rank):
    wrapped = brigade.DistributedDataParallel(Branches(), find_unused_parameters=True)
    for x in inputs(rank, 3):
        loss_of(wrapped((0, x))).backward()
        assert wrapped.reducer._ddp_graph_static()
    loss_of(wrapped((1, inputs(rank, 1)[0]))).backward()
    assert not wrapped.reducer._ddp_graph_static()


@on_ranks()
def test_logging_data_tell_times_and_the_order_of_gradients(rank):
    wrapped = brigade.DistributedDataParallel(Perceptron())
    for x in inputs(rank, 3):
        loss_of(wrapped(x)).backward()
    data = wrapped._get_ddp_logging_data()
    for key in ("forward_compute", "backward_compute", "backward_comm"):
        assert data[f"avg_{key}_time"] >= 1
    assert data["has_rebuilt_buckets"] == 1
    assert data["prev_iteration_grad_ready_order_indices"].startswith("7, ")


@on_ranks()
def test_gradient_times_tell_unused_parameters(rank):
    wrapped = brigade.DistributedDataParallel(Branches(), find_unused_parameters=True)
    loss_of(wrapped((0, inputs(rank, 1)[0]))).backward()
    wrapped((0, inputs(rank, 1)[0]))
    times = dict(
        zip(
            [name for name, _ in wrapped.module.named_parameters()],
            wrapped.reducer.get_backward_stats(),
            strict=True,
        )
    )
    assert times["never.bias"] == 0 and times["ways.1.weight"] == 0
    assert 0 < times["head.bias"] < times["ways.0.weight"]
    unused = [wrapped.module.never, wrapped.module.ways[1], wrapped.module.ways[2]]
    unused_bytes = sum(4 * p.numel() for module in unused for p in module.parameters())
    assert wrapped._get_ddp_logging_data()["unused_parameter_size"] == unused_bytes


@on_ranks()
def test_logging_data_tell_an_error_raised_in_backward(rank):
    def hook(state, bucket):
        raise ValueError("the hook is out of order")

    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2))
    wrapped.register_comm_hook(None, hook)
    assert "has_error" not in wrapped._get_ddp_logging_data()
    with pytest.raises(ValueError, match="out of order"):
        wrapped(torch.ones(1, 3)).sum().backward()
    data = wrapped._get_ddp_logging_data()
    assert data["has_error"] == 1 and data["iteration"] == 1
    assert "the hook is out of order" in data["error"]


@on_ranks()
def test_logging_data_after_construction_are_torchs(rank):
    wrapped = brigade.DistributedDataParallel(Perceptron(), bucket_cap_mb=1.5)
    theirs = CLASSES["torch"](Perceptron(), bucket_cap_mb=1.5)
    expected = theirs._get_ddp_logging_data()
    data = wrapped._get_ddp_logging_data()
    assert {key: data.get(key) for key in expected} == expected
    assert data["rank"] == rank and data["world_size"] == dist.get_world_size()
