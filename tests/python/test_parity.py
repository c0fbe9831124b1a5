"""Training has the bits of torch's class."""

import collections

import pytest
import torch
from torch import nn

import brigade

from ranks import on_ranks
from training import (
    Perceptron,
    assert_equal,
    assert_same_bits,
    both,
    expect_torchs_bits,
    inputs,
    loss_of,
    train,
)

VIEWS = {"gradient_as_bucket_view": True}


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


# (model, shape of its inputs, options of the wrapper)
CASES = [
    (Perceptron, (4, 6), {}),
    *((make, (4, 6), VIEWS) for make in (Embedding, Complex, Nested)),
    *((make, (4, 6), {}) for make in (Embedding, Complex, Nested)),
    *((Mixed, (6, 4), options) for options in ({}, VIEWS)),
]


@pytest.mark.parametrize(("make", "shape", "options"), CASES)
@on_ranks()
def test_training_has_torchs_bits(rank, make, shape, options):
    batches = inputs(rank, 5, shape)
    if make is Embedding:
        batches = [(batch.abs() * 100).long() % 11 for batch in batches]
    for set_to_none in (True, False):
        assert_same_bits(both(make, batches, set_to_none=set_to_none, **options))


@on_ranks(timeout_s=30, deadline_s=60)
def test_a_rank_may_evaluate_inside_of_join(rank):
    """Runs forwards without a reduction on a rank whose peer may have joined."""
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


class Summed(nn.Module):
    """Autograd gives the layer and the table gradients in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(3, 2), nn.Embedding(4, 2, sparse=True)

    def forward(self, x, rows):
        return self.layer(x) + self.table(rows)


@on_ranks()
def test_a_sparse_gradient_in_shared_memory_keeps_the_other_gradient(rank):
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
