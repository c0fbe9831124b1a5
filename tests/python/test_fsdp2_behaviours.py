"""What users of torch's fully_shard count on, each against one process.

The behaviours are those that torch's own tests of FSDP2 look at; the tests are ours.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from cases import pairwise
from ranks import run_ranks
from sharded_training import batch_of, expect_equal, make_net, shard_blocks, step_of_all


def _mean_gradients(plain, loss_of, world_size):
    """One process does what all ranks do: `loss_of` a model and a rank. None where unused."""
    sums = [None] * len(list(plain.parameters()))
    for rank in range(world_size):
        plain.zero_grad()
        loss_of(plain, rank).backward()
        for i, parameter in enumerate(plain.parameters()):
            if parameter.grad is not None:
                sums[i] = parameter.grad if sums[i] is None else sums[i] + parameter.grad
    for parameter, total in zip(plain.parameters(), sums, strict=True):
        parameter.grad = None if total is None else total * (1.0 / world_size)


def _trains_alike(rank, world_size, plain, model, loss_of, steps=4, make=torch.optim.AdamW):
    plain_optimizer = make(plain.parameters(), lr=0.05, foreach=False)
    optimizer = make(model.parameters(), lr=0.05)
    for step in range(steps):
        _mean_gradients(plain, lambda net, r, step=step: loss_of(net, r, step), world_size)
        plain_optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    expect_equal(model, plain)


def _random(size, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, size, generator=generator)


def _two_layers(rank, world_size, shapes, as_units):
    torch.manual_seed(0)
    (first, middle), (_, last) = shapes
    plain = nn.Sequential(nn.Linear(first, middle), nn.ReLU(), nn.Linear(middle, last))
    model = copy.deepcopy(plain)
    for layer in (model[0], model[2]) if as_units else ():
        brigade.fully_shard(layer)
    brigade.fully_shard(model)

    def loss_of(net, r, step):
        return net(_random(first, r, step)).sum()

    _trains_alike(rank, world_size, plain, model, loss_of, steps=10, make=torch.optim.Adam)


@pairwise(
    world_size=[2, 3],
    as_units=[False, True],
    shapes=[((16, 15), (15, 8)), ((7, 15), (15, 3)), ((16, 17), (17, 8)), ((1, 1), (1, 1))],
)
def test_sizes_that_no_number_of_ranks_divides(world_size, shapes, as_units):
    run_ranks(_two_layers, world_size, shapes, as_units, world_size=world_size)


def _forwards_before_a_backward(rank, world_size, reshards):
    plain, model = make_net(), shard_blocks(make_net(), reshard_after_forward=reshards)

    def loss_of(net, r, step):
        outputs = [net(_random(5, r, 10 * step + i)) for i in range(3)]
        return sum(output.square().mean() for output in outputs)

    _trains_alike(rank, world_size, plain, model, loss_of)


@pytest.mark.parametrize("reshards", [True, False])
def test_several_forwards_before_one_backward(reshards):
    run_ranks(_forwards_before_a_backward, 2, reshards)


class TiedEnds(nn.Module):
    """The first layer and the last have one weight, as embedding and head of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h) + h
        return self.head(h)


def _tied_beside_units(rank, world_size, reshards):
    torch.manual_seed(0)
    plain = TiedEnds()
    model = copy.deepcopy(plain)
    for block in model.blocks:
        brigade.fully_shard(block, reshard_after_forward=reshards)
    brigade.fully_shard(model)
    assert model.head.weight is model.embedding.weight

    def loss_of(net, r, step):
        generator = torch.Generator().manual_seed(100 * step + r)
        return net(torch.randint(7, (3, 4), generator=generator)).square().mean()

    _trains_alike(rank, world_size, plain, model, loss_of)
    assert model.head.weight is model.embedding.weight
    assert model.state_dict()["head.weight"] is not None


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reshards", [True, False])
def test_what_is_tied_beside_units_stays_tied(world_size, reshards):
    run_ranks(_tied_beside_units, world_size, reshards, world_size=world_size)


class Recurrent(nn.Module):
    """One layer, used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.outer = nn.Linear(5, 3)

    def forward(self, x):
        for _ in range(3):
            x = self.inner(x) + x
        return self.outer(x)


def _used_again(rank, world_size):
    torch.manual_seed(0)
    plain = Recurrent()
    model = copy.deepcopy(plain)
    brigade.fully_shard(model.inner)
    brigade.fully_shard(model)
    _trains_alike(
        rank, world_size, plain, model, lambda net, r, step: net(_random(5, r, step)).sum()
    )


def test_a_unit_used_several_times_in_a_forward():
    run_ranks(_used_again, 2)


def _micro_batches_in_turn(rank, world_size):
    """Forward, forward, backward, forward, backward, backward."""
    plain, model = make_net(), shard_blocks(make_net())
    _mean_gradients(
        plain,
        lambda net, r: sum(net(_random(5, r, i)).square().mean() for i in range(3)),
        world_size,
    )
    losses = [model(_random(5, rank, i)).square().mean() for i in range(2)]
    losses.pop(0).backward()
    losses.append(model(_random(5, rank, 2)).square().mean())
    losses.pop(0).backward()
    losses.pop(0).backward()
    found = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    found = model.full_state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_micro_batches_whose_backwards_come_in_turn():
    run_ranks(_micro_batches_in_turn, 2)


def _frozen(rank, world_size, which):
    plain = make_net()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(which not in name)
    model = shard_blocks(copy.deepcopy(plain))
    before = model.full_state_dict()

    def loss_of(net, r, step):
        return net(_random(5, r, step)).square().mean()

    _trains_alike(rank, world_size, plain, model, loss_of, make=torch.optim.SGD)
    after = model.full_state_dict()
    for name in before:
        assert torch.equal(before[name], after[name]) == (which in name), name
        assert (model.get_parameter(name).grad is None) == (which in name)


@pytest.mark.parametrize("which", ["bias", "blocks.1", "embed", "blocks"])
def test_frozen_parameters_inside_of_units_and_whole_units(which):
    run_ranks(_frozen, 2, which)


class Outputs(nn.Module):
    """Of two outputs and two branches, not all are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x), self.third(x)


def _unused(rank, world_size):
    torch.manual_seed(0)
    plain = Outputs()
    model = copy.deepcopy(plain)
    for layer in (model.first, model.second, model.third):
        brigade.fully_shard(layer)
    brigade.fully_shard(model)

    def loss_of(net, r, step):
        outputs = net(_random(4, r, step))
        if step == 2:
            return sum(output.sum() for output in outputs)
        return outputs[step % 2].sum()

    _trains_alike(rank, world_size, plain, model, loss_of)
    with torch.no_grad():
        assert model(_random(4, rank, 9))[0].grad_fn is None


def test_outputs_that_no_loss_uses():
    run_ranks(_unused, 2)


def _inner_alone(rank):
    """A backward that begins at an inner unit's output, after one through all."""
    plain, model = make_net(), shard_blocks(make_net())
    inside = []
    for net in (plain, model):
        net.blocks[1].register_forward_hook(lambda m, a, output: inside.append(output))
    x = batch_of(0, 0)
    for net in (plain, model):
        inside.clear()
        net(x)
        inside[0].square().mean().backward()
    with torch.no_grad():
        for net in (plain, model):
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)
    expect_equal(model, plain)
    assert all(p.grad is None for p in model.head.parameters())


def test_a_backward_from_the_middle():
    run_ranks(_inner_alone)


def _inner_called_alone(rank, world_size, reshards):
    """A forward of an inner unit and its backward, after one through all."""
    plain, model = make_net(), shard_blocks(make_net(), reshard_after_forward=reshards)

    def loss_of(net, r, step):
        if step % 3 == 0:
            return net(_random(5, r, step)).square().sum()
        return net.blocks[step % 3](_random(7, r, step)).square().sum()

    _trains_alike(rank, world_size, plain, model, loss_of, steps=7)


@pytest.mark.parametrize("reshards", [None, True, False])
def test_a_forward_and_backward_of_an_inner_unit_by_itself(reshards):
    run_ranks(_inner_called_alone, 2, reshards)


def _state_behind_a_forward(rank, reshards):
    plain, model = make_net(), shard_blocks(make_net(), reshard_after_forward=reshards)
    names = list(plain.state_dict())
    loss = model(batch_of(rank, 0)).square().mean()
    state = model.state_dict()
    assert list(state) == names
    for name, value in state.items():
        assert isinstance(value, brigade.TensorShard)
        assert value.shape == plain.state_dict()[name].shape
        assert value.to_local().data_ptr() == model.get_parameter(name).to_local().data_ptr()
    expect_equal(model, plain)
    loss.backward()
    doubled = {name: value * 2 for name, value in state.items()}
    model.load_state_dict(doubled)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    expect_equal(model, plain)
    with torch.no_grad():
        assert torch.equal(model(batch_of(rank, 1)), plain(batch_of(rank, 1)))
    model.load_state_dict(plain.state_dict())  # whole tensors are taken, too
    expect_equal(model, plain)


@pytest.mark.parametrize("reshards", [True, False])
def test_a_state_dict_behind_a_forward_is_of_parts(reshards):
    run_ranks(_state_behind_a_forward, reshards)


def _clips(rank, norm_type, foreach):
    plain, model = make_net(), shard_blocks(make_net())
    _mean_gradients(plain, lambda net, r: net(batch_of(r, 0)).square().mean(), 2)
    model(batch_of(rank, 0)).square().mean().backward()
    whole = [p.grad.double() for p in plain.parameters()]
    expected = nn.utils.get_total_norm(whole, norm_type).float()
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type, foreach=foreach)
    torch.testing.assert_close(found, expected)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    with torch.no_grad():
        for net in (plain, model):
            for parameter in net.parameters():
                parameter.copy_(parameter.grad)
    state = model.full_state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(state[name], parameter.data)


@pytest.mark.parametrize("norm_type", [1, 2, 3, float("inf")])
def test_norms_are_global_in_either_of_torchs_ways(norm_type):
    for foreach in (None, True, False):
        run_ranks(_clips, norm_type, foreach)


def _scales(rank):
    plain, model = make_net(), shard_blocks(make_net())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in (plain, model)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in "ab"]
    for step in range(5):
        _mean_gradients(
            plain,
            lambda net, r, step=step: scalers[0].scale(net(batch_of(r, step)).square().mean()),
            2,
        )
        optimizers[1].zero_grad()
        scalers[1].scale(model(batch_of(rank, step)).square().mean()).backward()
        if step in (1, 3):  # in the part of one rank alone
            plain.head.bias.grad[step // 2] = float("inf")
            own = model.head.bias
            first = brigade._C.offset_of(own)
            for index in range(own.to_local().numel()):
                if first + index == step // 2:
                    own.grad.to_local()[index] = float("inf")
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.unscale_(optimizer)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert scalers[1].get_scale() == scalers[0].get_scale()
        expect_equal(model, plain)
    assert scalers[1].get_scale() == 2.0**8


@pytest.mark.parametrize("world_size", [2])
def test_a_scaler_skips_a_step_on_all_ranks(world_size):
    run_ranks(_scales, world_size=world_size)


def _moving_average(rank):
    plain, model = make_net(), shard_blocks(make_net())
    plain_average = {name: p.detach().clone() for name, p in plain.named_parameters()}
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        step_of_all(plain, plain_optimizer, step, 2)
        optimizer.zero_grad()
        model(batch_of(rank, step)).square().mean().backward()
        optimizer.step()
        for net, values in ((plain, plain_average), (model, average)):
            for name, parameter in net.named_parameters():
                values[name].lerp_(parameter.detach(), 0.5)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(average)
    plain.load_state_dict(plain_average)
    expect_equal(model, plain)
    model.load_state_dict(trained)


def test_a_moving_average_of_parts():
    run_ranks(_moving_average)


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9)

    def encode(self, token):
        return torch.tanh(self.body(self.embed(token)))

    def forward(self, token):
        return self.head(self.encode(token))

    @torch.no_grad()
    def generate(self, token, steps):
        said = [token]
        for _ in range(steps):
            said.append(self(said[-1]).argmax(-1))
        return torch.stack(said)


def _generates(rank):
    torch.manual_seed(0)
    plain = Speaker()
    model = copy.deepcopy(plain)
    brigade.fully_shard(model.body)
    brigade.fully_shard(model)
    token = torch.arange(4)
    expected = plain.generate(token, 5)
    assert torch.equal(model.generate(token, 5), expected)
    with model.whole_parameters():
        assert torch.equal(model.head.weight, plain.head.weight)
        model(token).sum().backward()
        assert all(isinstance(p.grad, brigade.TensorShard) for p in model.parameters())
        model.zero_grad()
        assert torch.equal(model.generate(token, 5), expected)
        own, steps = token[rank:], 2 + rank  # no rank waits for another one
        assert torch.equal(model.generate(own, steps), plain.generate(own, steps))
        if rank == 0:
            with pytest.raises(IndexError):
                model.generate(torch.tensor([99]), 1)
    model(token).sum().backward()
    plain(token).sum().backward()
    with torch.no_grad():
        for net in (plain, model):
            for parameter in net.parameters():
                parameter.copy_(parameter.grad)
    expect_equal(model, plain)


def test_generation_in_parts_and_whole():
    run_ranks(_generates)


def _other_methods(rank):
    torch.manual_seed(0)
    plain = Speaker()
    model = copy.deepcopy(plain)
    brigade.fully_shard(model.body)
    brigade.fully_shard(model)
    token = torch.arange(4)
    with pytest.raises(ValueError, match="has no method 'speak'"):
        brigade.register_fsdp_forward_method(model, "speak")
    brigade.register_fsdp_forward_method(plain, "encode")
    brigade.register_fsdp_forward_method(model, "encode")
    for net in (plain, model):
        net.encode(token).square().sum().backward()
    with pytest.raises(IndexError):
        model.encode(torch.tensor([99]))
    assert isinstance(model.embed.weight, brigade.ShardedParameter)
    with torch.no_grad():
        for net in (plain, model):
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)
    expect_equal(model, plain)


def test_a_method_in_forwards_place():
    run_ranks(_other_methods)


def _accumulates_in_chunks(rank, world_size, synchronizes):
    plain, model = make_net(), shard_blocks(make_net())
    _mean_gradients(
        plain,
        lambda net, r: sum(net(_random(5, r, i)).square().mean() for i in range(4)),
        world_size,
    )
    for i in range(4):
        if not synchronizes:
            model.set_requires_gradient_sync(i == 3)
        model.set_is_last_backward(i == 3)
        model(_random(5, rank, i)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    state = model.full_state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(state[name], parameter.grad)
    assert model.sharding_statistics()["reduced_backwards"] == (4 if synchronizes else 1)


@pytest.mark.parametrize("synchronizes", [True, False])
def test_gradients_of_chunks_add_up(synchronizes):
    run_ranks(_accumulates_in_chunks, 2, synchronizes)


def _ignored(rank):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    kept = model[1].weight
    brigade.fully_shard(model, ignored_params={kept})
    assert model[1].weight is kept
    x = torch.full((2, 4), rank + 1.0)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(kept.grad, plain[1].weight.grad)  # this rank's own
    assert not isinstance(kept.grad, brigade.TensorShard)
    with pytest.raises(NotImplementedError, match="together with others"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    others = [p for p in model.parameters() if p is not kept]
    norms = [torch.zeros(()), torch.zeros(())]
    dist.all_gather(norms, nn.utils.clip_grad_norm_(others, 1.0))
    assert torch.equal(norms[0], norms[1])


def test_ignored_parameters():
    run_ranks(_ignored)
