"""Training gives the bits that torch's own class gives."""

import collections

import pytest
import torch
from torch import nn

import brigade

from ranks import on_ranks
from training import (
    CLASSES,
    Perceptron,
    assert_equal,
    assert_same_bits,
    both,
    expect_torchs_bits,
    inputs,
    loss_of,
    train,
)

OPTIONS = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 0.0002},
    "caps_by_bucket": {"bucket_cap_mb_list": [0.0001, 0.0004]},
    "no_buffers": {"broadcast_buffers": False},
}


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3, sparse=True)
        self.bag = nn.EmbeddingBag(11, 3, sparse=True, mode="sum")
        self.head = nn.Linear(3, 2)

    def forward(self, rows):
        return self.head(self.table(rows).sum(1) + self.bag(rows))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.b = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.randn(0, 5))

    def forward(self, x):
        return x[:, :4].to(torch.complex64) @ self.a * self.b + self.empty.sum()


class Mixed(nn.Module):
    """Several dtypes, a channels-last weight, a shared parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(4, 4).double()
        self.tied = nn.Linear(4, 4).double()
        self.tied.weight = self.wide.weight

    def forward(self, x):
        y = self.conv(x.reshape(1, 2, 3, -1)).sum((2, 3)).double()
        return self.tied(torch.relu(self.wide(y)))


Pair = collections.namedtuple("Pair", ["first", "rest"])


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        return Pair(self.a(x), {"list": [self.b(x)], "tuple": (self.c(x), None, 3)})


# A model, the shape of its inputs, and options of the wrapper.
CASES = [
    *((Perceptron, (4, 6), options) for options in OPTIONS.values()),
    *((make, (4, 6), OPTIONS["views"]) for make in (Embedding, Complex, Nested)),
    *((make, (4, 6), {}) for make in (Embedding, Complex, Nested)),
    *((Mixed, (6, 4), OPTIONS[name]) for name in ("default", "views")),
]


@pytest.mark.parametrize(("make", "shape", "options"), CASES)
@on_ranks()
def test_training_gives_the_same_bits(rank, make, shape, options):
    batches = inputs(rank, 5, shape)
    if make is Embedding:
        batches = [(batch.abs() * 100).long() % 11 for batch in batches]
    for set_to_none in (True, False):
        assert_same_bits(both(make, batches, set_to_none=set_to_none, **options))


@on_ranks()
def test_half_precision_gradients_are_divided_before_the_sum(rank):
    results = both(lambda: nn.Linear(6, 3).half(), [x.half() for x in inputs(rank, 3)])
    assert_same_bits(results)


class _Checkpointed(nn.Module):
    """Whose backward runs others inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)


@on_ranks()
def test_backwards_of_forwards_under_no_sync_are_local_whichever_forward_was_first(rank):
    """Micro-batches whose forward runs before the backward of the one before."""
    wrapped = brigade.DistributedDataParallel(_Checkpointed())
    weight = next(wrapped.module.parameters())
    x = torch.ones(1, 3)
    for _ in range(3):
        wrapped.zero_grad()
        with wrapped.no_sync():
            first = wrapped(x * 100 * (rank + 1)).sum()
            second = wrapped(x * 10).sum()
        last = wrapped(x * 8).sum()
        first.backward()
        assert weight.grad.tolist() == [[100.0 * (rank + 1)] * 3] * 2
        second.backward()
        assert weight.grad.tolist() == [[100.0 * (rank + 1) + 10] * 3] * 2
        last.backward()
        assert weight.grad.tolist() == [[150.0 + 10 + 8] * 3] * 2


@on_ranks(timeout_s=30, deadline_s=60)
def test_a_rank_may_evaluate_inside_of_join(rank):
    """Forwards that nothing is reduced behind, on a rank whose peer may have run out."""
    seen = {}
    for evaluates in (False, True):
        torch.manual_seed(0)
        wrapped = brigade.DistributedDataParallel(Perceptron())
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1 / 128)
        with wrapped.join():
            for x in inputs(rank, 2 + 2 * rank):
                optimizer.zero_grad()
                loss_of(wrapped(x)).backward()
                optimizer.step()
                if evaluates and rank == 1:
                    wrapped.eval()
                    with torch.no_grad():
                        wrapped(x)
                    wrapped.train()
        seen[evaluates] = [tensor.clone() for tensor in wrapped.state_dict().values()]
    assert_equal(seen[True], seen[False])


@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (0, 3), (0, 1)], ids=str)
@pytest.mark.parametrize("by_initial", [True, False])
@on_ranks()
def test_ranks_with_fewer_inputs_join(rank, by_initial, batches):
    def run(wrapper):
        wrapped = wrapper(Perceptron())
        with wrapped.join(divide_by_initial_world_size=by_initial):
            return train(wrapped, inputs(rank, batches[rank]))

    expect_torchs_bits(run)


@on_ranks()
def test_construction_without_init_sync_waits_for_nobody(rank):
    if rank == 0:
        brigade.DistributedDataParallel(Perceptron(), init_sync=False)


class Summed(nn.Module):
    """Autograd gives the layer and the table one gradient in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(3, 2), nn.Embedding(4, 2, sparse=True)

    def forward(self, x, rows):
        return self.layer(x) + self.table(rows)


@on_ranks()
def test_a_sparse_gradient_that_shares_memory_leaves_the_other_one_alone(rank):
    torch.manual_seed(0)
    model = Summed()
    wrapped = brigade.DistributedDataParallel(model)
    for _ in range(3):
        wrapped.zero_grad()
        x = torch.full((2, 3), 2.0 * rank)
        (wrapped(x, torch.tensor([rank, 3])) * 4).sum().backward()
        assert model.layer.weight.grad.tolist() == [[8.0] * 3] * 2
        assert model.layer.bias.grad.tolist() == [8.0] * 2
        dense = model.table.weight.grad.to_dense()
        assert dense.tolist() == [[2.0] * 2, [2.0] * 2, [0.0] * 2, [4.0] * 2]


class _Shared(nn.Module):
    """A weight used twice."""

    def __init__(self):
        super().__init__()
        self.body = Perceptron()
        self.twice = nn.Linear(3, 3)

    def forward(self, x):
        return self.twice(self.twice(self.body(x)).tanh())


@pytest.mark.parametrize(
    ("make_model", "options"),
    [
        (Perceptron, {}),
        (Perceptron, {"gradient_as_bucket_view": True}),
        (Perceptron, {"find_unused_parameters": True}),
        (Perceptron, {"static_graph": True}),
        (_Shared, {"static_graph": True}),
        (_Shared, {"static_graph": True, "find_unused_parameters": True}),
    ],
    ids=["default", "views", "find_unused", "static", "static_shared", "static_find_unused"],
)
@on_ranks()
def test_buckets_are_rebuilt_when_torch_rebuilds_them(rank, make_model, options):
    """Per forward: whether buckets have been rebuilt; then what they are."""

    def run(wrapper):
        wrapped = wrapper(make_model(), bucket_cap_mb_list=[1e-5], **options)
        forwards = []
        for step, x in enumerate(inputs(rank, 6)):
            if step == 1:
                with wrapped.no_sync():  # counts for nothing
                    loss_of(wrapped(x)).backward()
                forwards.append(wrapped._has_rebuilt_buckets)
            loss = loss_of(wrapped(x))
            forwards.append(wrapped._has_rebuilt_buckets)
            loss.backward()
        data = wrapped._get_ddp_logging_data()
        keys = ("rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices")
        return forwards, [data.get(key) for key in keys]

    assert run(CLASSES["brigade"]) == run(CLASSES["torch"])
