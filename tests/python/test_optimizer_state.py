"""All ranks get one rank's optimizer state, and one rank's buffers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks
from sharded_training import expect_same
from training import Perceptron, inputs, loss_of

_OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def _model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def _step(rank, model, optimizer, count):
    for x in inputs(rank, count):

        def closure(x=x):
            optimizer.zero_grad()
            loss = loss_of(model(x.to(next(model.parameters()).dtype)))
            loss.backward()
            return loss

        optimizer.step(closure)


def _leaves(optimizer):
    """The whole state with its structure: by path in torch's own form of it."""
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(optimizer.state_dict())
    return {torch.utils._pytree.keystr(path): leaf for path, leaf in leaves}


def _require_same(optimizer, source):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, _leaves(optimizer))
    assert list(gathered[source]) == list(gathered[0]) == list(gathered[-1])
    for name, theirs in gathered[source].items():
        own = _leaves(optimizer)[name]
        if not isinstance(theirs, torch.Tensor):
            assert own == theirs, name
            continue
        assert own.dtype == theirs.dtype and own.stride() == theirs.stride(), name
        assert torch.equal(own.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)), name


@pytest.mark.parametrize(
    ("name", "source", "dtype", "world_size"),
    [
        *((name, 2, torch.float32, 3) for name in _OPTIMIZERS),
        ("adam", 0, torch.float32, 2),  # an empty state
        ("sgd", 1, torch.bfloat16, 2),
    ],
)
@on_ranks()
def test_every_rank_gets_the_state_of_one_and_goes_on_alike(rank, name, source, dtype, world_size):
    model = _model(dtype)
    optimizer = _OPTIMIZERS[name](model.parameters())
    _step(rank, model, optimizer, rank)  # rank 0's state is empty
    optimizer.param_groups[0]["lr"] = 0.5 + rank
    brigade.broadcast_optimizer_state(optimizer, src=source)
    _require_same(optimizer, source)
    assert optimizer.param_groups[0]["lr"] == 0.5 + source
    for parameter in model.parameters():
        dist.broadcast(parameter.data, source)
    _step(0, model, optimizer, 2)  # the same data on all
    _require_same(optimizer, source)
    gathered = [torch.empty_like(model[0].weight) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, model[0].weight.detach())
    assert all(torch.equal(gathered[0], other) for other in gathered)


def _odd_state():
    """As optimizers that others wrote keep: any key, any dtype, any stride, no tensor."""
    return {
        "kept": torch.full((3, 4), 2.5, dtype=torch.float64),
        "across": torch.arange(12.0).view(4, 3).t(),
        "flags": torch.tensor([True, False, True]),
        "wave": torch.tensor([1 + 2j, -0.0j]),
        "expanded": torch.tensor([7], dtype=torch.int16).expand(4),
        "none": torch.empty(0, 3),
        "history": [torch.ones(2), (3, "text", None)],
    }


@on_ranks()
def test_any_kind_of_state_arrives(rank):
    first, second = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 2.0}])
    kept = torch.zeros(3, 4, dtype=torch.float64)
    overlapping = torch.zeros(1, dtype=torch.int16).expand(4)
    optimizer.state[first] = {"kept": kept, "expanded": overlapping}
    if rank == 1:
        optimizer.state[first] = _odd_state()
        optimizer.state["global"] = {"step": torch.tensor(5), "scale": 0.25}
        optimizer.param_groups[1]["extra"] = torch.tensor(3.0)
    brigade.broadcast_optimizer_state(optimizer, src=1)
    state = optimizer.state[first]
    assert list(state) == list(_odd_state())
    expect_same(state, _odd_state())
    assert rank == 1 or state["kept"] is kept  # in its place
    assert state["across"].stride() == (1, 3)
    expect_same(optimizer.state["global"], {"step": torch.tensor(5), "scale": 0.25})
    assert second not in optimizer.state
    assert optimizer.param_groups[1]["lr"] == 2.0 and optimizer.param_groups[1]["extra"] == 3.0
    assert optimizer.param_groups[1]["params"] == [second]


@on_ranks()
def test_optimizers_that_differ_or_are_split_are_refused_on_every_rank(rank):
    optimizer = torch.optim.SGD(nn.Linear(2, 2 + rank).parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match="parameter of the optimizer 0"):
        brigade.broadcast_optimizer_state(optimizer)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    with pytest.raises(ValueError, match="below 2, got 2"):
        brigade.broadcast_optimizer_state(optimizer, src=2)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    sharded = ZeroRedundancyOptimizer(
        nn.Linear(2, 2).parameters(), optimizer_class=torch.optim.SGD, lr=1.0
    )
    with pytest.raises(TypeError, match="ZeroRedundancyOptimizer has a part on each"):
        brigade.broadcast_optimizer_state(sharded)
    alone, _ = dist.new_subgroups(group_size=1)
    brigade.broadcast_optimizer_state(optimizer, alone)


@on_ranks()
def test_buffers_are_made_those_of_one_rank(rank):
    wrapped = brigade.DistributedDataParallel(Perceptron(), forward_sync_buffers=rank < 2)
    loss_of(wrapped(inputs(rank, 1)[0])).backward()
    means = wrapped.module.layers[1].running_mean

    def gathered():
        tensors = [torch.empty_like(means) for _ in range(2)]
        dist.all_gather(tensors, means)
        return tensors

    before = gathered()
    assert not torch.equal(*before)
    wrapped.sync_buffers()
    assert torch.equal(means, before[0])
    means += rank
    before = gathered()
    wrapped.sync_buffers(src=1)
    assert torch.equal(means, before[1])
    brigade.DistributedDataParallel(nn.Linear(2, 2)).sync_buffers()  # it has none
