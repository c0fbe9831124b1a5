"""Training gives the bits that torch's own class gives."""

import collections
import itertools

import pytest
import torch
from torch import nn

import brigade

from ranks import on_ranks, run_ranks
from training import (
    CLASSES,
    Perceptron,
    assert_equal,
    assert_same_bits,
    both,
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


def _train_both(rank, make_model, shape, options, set_to_none):
    batches = inputs(rank, 5, shape)
    if make_model is Embedding:
        batches = [(batch.abs() * 100).long() % 11 for batch in batches]
    assert_same_bits(both(make_model, batches, set_to_none=set_to_none, **options))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_perceptron_trains_to_the_same_bits(name, set_to_none):
    run_ranks(_train_both, Perceptron, (4, 6), OPTIONS[name], set_to_none)


@pytest.mark.parametrize("make_model", [Embedding, Complex, Nested])
@pytest.mark.parametrize("views", [False, True])
def test_other_kinds_of_gradients_train_to_the_same_bits(make_model, views):
    run_ranks(_train_both, make_model, (4, 6), {"gradient_as_bucket_view": views}, True)


@pytest.mark.parametrize("views", [False, True])
def test_several_dtypes_and_strides_train_to_the_same_bits(views):
    run_ranks(_train_both, Mixed, (6, 4), {"gradient_as_bucket_view": views}, True)


@on_ranks()
def test_half_precision_gradients_are_divided_before_the_sum(rank):
    results = both(lambda: nn.Linear(6, 3).half(), [x.half() for x in inputs(rank, 3)])
    assert_same_bits(results)


@on_ranks()
def test_gradients_are_the_average_that_one_process_computes(rank):
    torch.manual_seed(0)
    wrapped = CLASSES["brigade"](nn.Linear(6, 3))
    torch.manual_seed(0)
    alone = nn.Linear(6, 3)
    for batches in zip(inputs(0, 4), inputs(1, 4), strict=True):
        wrapped.zero_grad()
        alone.zero_grad()
        loss_of(wrapped(batches[rank])).backward()
        ((loss_of(alone(batches[0])) + loss_of(alone(batches[1]))) / 2).backward()
        for ours, expected in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad)


@on_ranks()
def test_gradients_keep_their_graph(rank):
    wrapped = CLASSES["brigade"](nn.Linear(6, 1))
    (x,) = inputs(rank, 1)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(x).square().sum().backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in wrapped.parameters())
        wrapped.zero_grad()
        penalty.backward()
        assert all(p.grad.abs().sum() > 0 for p in wrapped.parameters())


@on_ranks()
def test_two_losses_of_one_forward_have_a_backward_each(rank):
    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        wrapped = wrapper(Nested())
        for x in inputs(rank, 3):
            wrapped.zero_grad()
            output = wrapped(x)
            loss_of(output.first).backward()
            loss_of(output.rest).backward()
        results[name] = [p.grad.clone() for p in wrapped.parameters()]
    assert_same_bits(results)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks()
def test_gradients_accumulate_without_synchronising(rank, set_to_none):
    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        wrapped = wrapper(Perceptron())
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        seen = []
        for step, x in enumerate(inputs(rank, 8)):
            if step % 2 == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
                with wrapped.no_sync():
                    loss_of(wrapped(x)).backward()
            else:
                loss_of(wrapped(x)).backward()
                seen += [p.grad.clone() for p in wrapped.parameters()]
                optimizer.step()
        results[name] = seen
    assert_same_bits(results)


@on_ranks()
def test_a_forward_without_backward_does_not_reach_into_no_sync(rank):
    wrapped = CLASSES["brigade"](nn.Linear(3, 2))
    x = torch.full((1, 3), float(rank))
    wrapped(x)  # prepared, but never gone back through
    with wrapped.no_sync():
        wrapped(x).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[float(rank)] * 3] * 2


def _plain():
    return nn.Linear(3, 2)


class _Checkpointed(nn.Module):
    """Whose backward runs others inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.parametrize("make", [_plain, _Checkpointed])
@on_ranks()
def test_backwards_of_forwards_under_no_sync_are_local_whichever_forward_was_first(rank, make):
    """Micro-batches whose forward runs before the backward of the one before."""
    wrapped = CLASSES["brigade"](make())
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


@on_ranks()
def test_a_forward_under_no_sync_on_one_rank_is_its_own(rank):
    wrapped = CLASSES["brigade"](nn.Linear(1, 1, bias=False))
    for _ in range(3):
        wrapped.zero_grad()
        if rank == 0:
            with wrapped.no_sync():
                local = wrapped(torch.full((1, 1), 100.0)).sum()
        loss = wrapped(torch.full((1, 1), 8.0)).sum()
        if rank == 0:
            local.backward()
        loss.backward()
        assert wrapped.module.weight.grad.item() == (100 + 8 + 8) / 2


@on_ranks()
def test_forwards_without_backward_cost_nothing(rank):
    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        wrapped = wrapper(nn.Linear(6, 3))
        for x in inputs(rank, 3):
            wrapped(x)
            with torch.no_grad():
                wrapped(x)
        results[name] = train(wrapped, inputs(rank, 2))
    assert_same_bits(results)


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


@pytest.mark.parametrize("batches", [(3, 5), (1, 3), (3, 1), (0, 3), (3, 0), (0, 1)], ids=str)
@pytest.mark.parametrize("by_initial", [True, False])
@on_ranks()
def test_ranks_with_fewer_inputs_join(rank, by_initial, batches):
    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        wrapped = wrapper(Perceptron())
        with wrapped.join(divide_by_initial_world_size=by_initial):
            results[name] = train(wrapped, inputs(rank, batches[rank]))
    assert_same_bits(results)


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({"bucket_cap_mb": 1e-5}, 1, 8),
        ({}, 1, 1),
    ],
    ids=["small", "default"],
)
@on_ranks()
def test_buckets_are_rebuilt_before_the_second_forward(rank, options, before, after):
    wrapped = brigade.DistributedDataParallel(Perceptron(), **options)
    for rebuilt in (False, False, True, True):
        data = wrapped._get_ddp_logging_data()
        assert wrapped._has_rebuilt_buckets is rebuilt
        assert data["bucket_sizes"].count(",") + 1 == before
        loss_of(wrapped(inputs(rank, 1)[0])).backward()
    rebuilt_sizes = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    assert rebuilt_sizes.count(",") + 1 == after


@on_ranks()
def test_buckets_stay_where_unused_parameters_are_looked_for(rank):
    wrapped = brigade.DistributedDataParallel(Perceptron(), find_unused_parameters=True)
    for _ in range(3):
        loss_of(wrapped(inputs(rank, 1)[0])).backward()
    assert not wrapped._has_rebuilt_buckets


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


@on_ranks(3)
def test_bits_do_not_depend_on_where_gradients_lie(rank):
    found = []
    for views, set_to_none in itertools.product((False, True), repeat=2):
        torch.manual_seed(0)
        wrapped = brigade.DistributedDataParallel(Perceptron(), gradient_as_bucket_view=views)
        found.append(train(wrapped, inputs(rank, 4), set_to_none=set_to_none))
    for gradients in found[1:]:
        assert_equal(gradients, found[0])
