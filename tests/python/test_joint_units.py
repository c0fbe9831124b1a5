"""Several modules that are sharded as one unit."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import brigade

from ranks import run_ranks
from sharded_training import Block, expect_equal, is_unsharded


class Tied(nn.Module):
    """What a language model is made of: its first and its last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([Block(7) for _ in range(2)])
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens, to_the_end=True, checkpointed=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = (
                block(x)
                if checkpointed is None
                else checkpoint(block, x, use_reentrant=checkpointed)
            )
        if not to_the_end:
            return x * self.scale.sum()
        if checkpointed is None:
            return self.head(self.norm(x)) * self.scale.sum()
        x = checkpoint(self.norm, x, use_reentrant=checkpointed)
        if checkpointed:  # what is tied would come from a backward inside of the other
            return self.head(x) * self.scale.sum()
        return checkpoint(self.head, x, use_reentrant=False) * self.scale.sum()


def _model():
    torch.manual_seed(0)
    return Tied()


def _sharded(model, **arguments):
    for block in model.blocks:
        brigade.fully_shard(block, **arguments)
    joint = [model.embed, model.norm, model.head]
    assert brigade.fully_shard(joint, **arguments) is joint
    return brigade.fully_shard(model, **arguments)


def _tokens(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (2, 3), generator=generator)


def _add(first, second):
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _step_of_all(plain, optimizer, inputs, options):
    """As sharded_training's, but that parameters may be unused."""
    sums = [None] * len(list(plain.parameters()))
    for tokens, of_rank in zip(inputs, options, strict=True):
        plain.zero_grad()
        plain(tokens, **of_rank).square().mean().backward()
        sums = [_add(a, p.grad) for a, p in zip(sums, plain.parameters(), strict=True)]
    for parameter, gradient in zip(plain.parameters(), sums, strict=True):
        parameter.grad = None if gradient is None else gradient * (1.0 / len(inputs))
    optimizer.step()


def _trains(rank, world_size, arguments, options):
    """`options`: of forward, by step, by rank."""
    plain, model = _model(), _sharded(_model(), **arguments)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    for step, by_rank in enumerate(options):
        inputs = [_tokens(r, step) for r in range(world_size)]
        _step_of_all(plain, plain_optimizer, inputs, by_rank)
        optimizer.zero_grad()
        model(inputs[rank], **by_rank[rank]).square().mean().backward()
        optimizer.step()
        assert all(isinstance(p, brigade.ShardedParameter) for p in model.parameters())
    expect_equal(model, plain)
    return model.sharding_statistics()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("reshards", [None, True, False])
def test_equals_one_process(world_size, reshards):
    arguments = {"reshard_after_forward": reshards}
    options = [[{}] * world_size] * 4
    statistics = run_ranks(_trains, world_size, arguments, options, world_size=world_size)
    # Gathered once in forward, and once in backward.
    assert all(found["learned_segments"] <= 2 for found in statistics)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts(reentrant):
    run_ranks(_trains, 2, {}, [[{"checkpointed": reentrant}] * 2] * 3)


@pytest.mark.parametrize("reshards", [True, False])
def test_forward_of_some_of_them(reshards):
    part, all_of_it = {"to_the_end": False}, {}
    options = [[part, part], [all_of_it, all_of_it], [part, part], [part, all_of_it]]
    run_ranks(_trains, 2, {"reshard_after_forward": reshards}, options)


def _stays_whole(rank):
    model = _sharded(_model())
    seen = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(is_unsharded(model.head.weight)))
    model(_tokens(rank, 0))
    assert seen == [True]
    assert not is_unsharded(model.head.weight)
    before = model.sharding_statistics()["buffer_bytes"]
    with torch.no_grad():
        model(_tokens(rank, 0), to_the_end=False)
        assert not is_unsharded(model.embed.weight)
        model(_tokens(rank, 0), to_the_end=False)
    assert model.sharding_statistics()["buffer_bytes"] == before
    assert "'embed, norm, head': 3 parameters" in model.explain()


def test_whole_from_the_first_forward_to_the_last():
    run_ranks(_stays_whole)


class TwoHeads(nn.Module):
    """Both run, one after the other; backward may go through either."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        x = self.body(x)
        return [head(x) for head in self.heads]


def _backward_through_one(rank):
    torch.manual_seed(0)
    model = TwoHeads()
    plain = copy.deepcopy(model)
    brigade.fully_shard(list(model.heads))
    brigade.fully_shard(model)
    x = torch.ones(2, 4)
    for used in ([0], [1], [0, 1], [1, 0]):
        sum(plain(x)[i].square().sum() for i in used).backward()
        sum(model(x)[i].square().sum() for i in used).backward()
    with torch.no_grad():
        for trained in (model, plain):
            for parameter in trained.parameters():
                parameter.copy_(parameter.grad)
    expect_equal(model, plain)


def test_backward_through_some_of_them():
    run_ranks(_backward_through_one)


def _called_twice(rank):
    class Twice(TwoHeads):
        def forward(self, x):
            first, second = self.heads
            return second(first(first(self.body(x)))) + first(x)

    torch.manual_seed(0)
    model = Twice()
    plain = copy.deepcopy(model)
    brigade.fully_shard(list(model.heads))
    brigade.fully_shard(model)
    x = torch.ones(2, 4)
    for _ in range(3):
        for trained in (model, plain):
            trained.zero_grad()
            trained(x).square().sum().backward()
    with torch.no_grad():
        for trained in (model, plain):
            for parameter in trained.parameters():
                parameter.copy_(parameter.grad)
    expect_equal(model, plain)


def test_one_of_them_called_more_often():
    run_ranks(_called_twice)


def _fails(rank):
    class Bad(nn.Linear):
        fails = False

        def forward(self, x):
            if self.fails:
                raise ValueError("bad batch")
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Bad(4, 4), Bad(4, 4), nn.Linear(4, 4))
    brigade.fully_shard([model[0], model[2]])
    brigade.fully_shard(model[1])
    brigade.fully_shard(model)
    for step in range(5):
        bad = model[step % 2 + 1]  # between the two of a unit, or the second
        bad.fails = step in (1, 2) and rank == 1
        model.zero_grad()
        if step in (1, 2):
            expected = ValueError if bad.fails else dist.DistBackendError
            with pytest.raises(expected, match="bad batch"):
                model(torch.ones(2, 4)).sum().backward()
            assert all(isinstance(p, brigade.ShardedParameter) for p in model.parameters())
            bad.fails = False
        else:
            model(torch.ones(2, 4)).sum().backward()
            assert all(p.grad is not None for p in model.parameters())


def test_a_failure_inside_of_them():
    run_ranks(_fails)


def _with_norms_apart(model, **arguments):
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    brigade.fully_shard(norms, reshard_after_forward=False, **arguments)
    for block in model.blocks:
        brigade.fully_shard(block, **arguments)
    return brigade.fully_shard(model, **arguments)


def _norms(rank, world_size):
    plain, model = _model(), _with_norms_apart(_model())
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, foreach=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # Three norms of 14 elements, two blocks without theirs, and the rest.
    padded = [-(-numel // world_size) * world_size for numel in (42, 232, 232, 80)]
    sent_once = [4 * numel // world_size * (world_size - 1) for numel in padded]
    for step in range(4):
        inputs = [_tokens(r, step) for r in range(world_size)]
        _step_of_all(plain, plain_optimizer, inputs, [{}] * world_size)
        before = model.sharding_statistics() if step else dict.fromkeys(_COUNTS, 0)
        optimizer.zero_grad()
        model(inputs[rank]).square().mean().backward()
        after = model.sharding_statistics()
        sent = {name: after[name] - before[name] for name in _COUNTS}
        # Norms, and what is outermost, once; blocks for forward and for backward.
        assert sent["sent_by_gathers"] == sum(sent_once) + sent_once[1] + sent_once[2]
        assert sent["sent_by_sums"] == sum(sent_once)
        assert sent["reductions"] == 4
        assert after["learned_segments"] <= 2
        optimizer.step()
    expect_equal(model, plain)


_COUNTS = ("sent_by_gathers", "sent_by_sums", "reductions")


@pytest.mark.parametrize("world_size", [2, 3])
def test_norms_of_all_blocks(world_size):
    run_ranks(_norms, world_size, world_size=world_size)


def _named_by_path(rank):
    model = _sharded(_model())
    model(_tokens(rank, 0))  # makes the root, which knows where modules are
    model.norm.weight.data = torch.zeros(7)
    with pytest.raises(RuntimeError, match=r"parameter 'norm\.weight' was given a plain tensor"):
        model(_tokens(rank, 1))


def test_parameters_are_named_by_their_path():
    run_ranks(_named_by_path)


def _outermost(rank):
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    plain = copy.deepcopy(nn.ModuleList(modules))
    brigade.fully_shard(modules)
    x = torch.ones(2, 4)
    for _ in range(2):
        for first, second in (modules, plain):
            first.zero_grad()
            second.zero_grad()
            second(first(x)).square().sum().backward()
    state = modules[1].full_state_dict()
    assert torch.equal(state["weight"], plain[1].weight)
    shards = [p for module in modules for p in module.parameters()]
    for shard, whole in zip(shards, plain.parameters(), strict=True):
        held = torch.zeros(2)
        held[rank] = shard.grad.to_local().sum()
        dist.all_reduce(held)
        assert held.sum() == whole.grad.sum()
    assert "'[0], [1]': 4 parameters" in modules[0].explain()


def test_outermost():
    run_ranks(_outermost)


def _refused(rank):
    model = _model()
    with pytest.raises(ValueError, match="an empty list"):
        brigade.fully_shard([])
    with pytest.raises(ValueError, match="in the list twice, or has another"):
        brigade.fully_shard([model, model.head])
    with pytest.raises(ValueError, match="in the list twice, or has another"):
        brigade.fully_shard([model.head, model.head])
    brigade.fully_shard([model.norm, model.blocks[0]])
    with pytest.raises(ValueError, match="sharded already"):
        brigade.fully_shard([model.embed, model.norm])
    other = nn.Linear(7, 7, bias=False)
    brigade.fully_shard([model.embed, model.head])
    other.weight = model.embed.weight
    with pytest.raises(ValueError, match="is 'weight' of a sharded Embedding with Linear"):
        brigade.fully_shard(other)


def test_lists_that_are_refused():
    run_ranks(_refused, world_size=1)
