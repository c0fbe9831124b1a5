"""Models sharded on the meta device, which get memory and values later."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks
from sharded_training import Net, Pair, batch_of, expect_equal, make_net, shard_blocks


def _on_meta(make=Net, **arguments):
    with torch.device("meta"):
        return make(**arguments)


def _expect_trains_alike(rank, model, plain):
    pair = Pair(rank, torch.optim.AdamW, nets=(plain, model))
    for step in range(2):
        pair.expect_step(step)


def _reset(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _init(module):
    """Initializes as a user's function: by kind of module, by shapes, rows and values."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.normal_(module.bias, std=module.weight.shape[1] ** -0.5)
    elif isinstance(module, nn.LayerNorm):
        module.bias.data.uniform_(-1 / math.sqrt(module.bias.size(0)), 1)
        module.weight = nn.Parameter(torch.full_like(module.weight, 2.0))


def _allocate_and_reset(model):
    """Allocates module by module, as init functions of FSDP1 do."""
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
    _reset(model)


_WAYS = {
    "reset": _reset,
    "modules": _allocate_and_reset,
    "apply": lambda model: model.apply(_init),
    "blocks": lambda model: (_reset(model), model.blocks.apply(_init)),
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("way", list(_WAYS))
@on_ranks()
def test_initial_values_equal_one_process(rank, way, world_size):
    plain, model = make_net(), _on_meta()
    shard_blocks(model, reshard_after_forward=world_size > 1)
    assert all(p.is_meta and isinstance(p, brigade.ShardedParameter) for p in model.parameters())
    if way != "modules":
        model.to_empty(device="cpu")
    torch.manual_seed(7)
    _WAYS[way](plain)
    torch.manual_seed(7)
    _WAYS[way](model)
    assert all(isinstance(p, brigade.ShardedParameter) for p in model.parameters())
    expect_equal(model, plain)
    _expect_trains_alike(rank, model, plain)


def _init_all(model):
    """Initializes from the root down; some modules need a unit's unsharded parameter."""
    _reset(model)
    nn.init.trunc_normal_(model.head.weight, std=model.head.weight.shape[-1] ** -0.5)
    nn.init.orthogonal_(model.blocks[1].up.weight)
    model.scale.fill_(0.5)


@pytest.mark.parametrize("mesh", [None, (2, 2), (4, 1)])
@on_ranks(4)
def test_a_model_initializes_itself(rank, mesh):
    arguments = {}
    if mesh is not None:
        arguments["mesh"] = dist.device_mesh.init_device_mesh("cpu", mesh)
    plain, model = make_net(), _on_meta()
    for net in (plain, model):
        device = net.head.weight.device
        net.register_buffer("scale", torch.ones(6, device=device), persistent=False)
    shard_blocks(model, **arguments).to_empty(device="cpu")
    if mesh is None or mesh[-1] > 1:
        with pytest.raises(NotImplementedError, match="sharded"), torch.no_grad():
            _init_all(model)
    torch.manual_seed(0)
    with torch.no_grad(), model.whole_parameters(writes=True):
        _init_all(model)
    torch.manual_seed(0)
    with torch.no_grad():
        _init_all(plain)
    expect_equal(model, plain)
    assert torch.equal(model.scale, torch.full((6,), 0.5))
    assert torch.equal(model(batch_of(rank, 0)), plain(batch_of(rank, 0)))


@on_ranks()
def test_parameters_still_on_meta_are_named_on_all_ranks(rank):
    plain, model = make_net(), shard_blocks(_on_meta())
    words = r"22 on meta: 'embed.weight', .* and 17 more.*\nCall to_empty"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            model(batch_of(rank, 0))
    with pytest.raises(RuntimeError, match="on meta"):
        model.full_state_dict()
    model.blocks[1].to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="16 on meta"):
        model(batch_of(rank, 0))
    parameters = list(model.parameters())
    model.load_state_dict(plain.state_dict(), assign=True)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    _expect_trains_alike(rank, model, plain)


@on_ranks()
def test_all_ranks_raise_if_one_rank_alone_allocates(rank):
    model = shard_blocks(_on_meta())
    with pytest.raises(RuntimeError, match=r"rank 1: .*22 on meta: 'embed.weight'"):
        if rank == 0:
            model.to_empty(device="cpu")
        model(batch_of(rank, 0))


@on_ranks()
def test_a_rank_may_initialize_alone(rank):
    model, plain = shard_blocks(_on_meta()).to_empty(device="cpu"), make_net()
    for net in (model, plain):
        torch.manual_seed(5)
        _reset(net)
    if rank == 0:
        model.head.reset_parameters()
    model(batch_of(rank, 0)).sum().backward()
    own = [p for p in model.parameters() if p is not model.head.weight and p is not model.head.bias]
    assert len(own) == len(list(model.parameters())) - 2
    state = model.full_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value) or name.startswith("head"), name


@on_ranks()
def test_a_unit_partly_on_meta_is_an_error(rank):
    model = _on_meta()
    model.head = nn.Linear(7, 2)
    with pytest.raises(ValueError, match=r"'head\.weight' .* is on cpu, the first one on meta"):
        brigade.fully_shard(model)
    on_one_rank = _on_meta() if rank == 0 else make_net()
    with pytest.raises(ValueError, match=r"'embed\.weight' of unit .*\n.* on meta"):
        brigade.fully_shard(on_one_rank)


@on_ranks()
def test_functions_that_initialize_shards(rank):
    plain, model = make_net(), shard_blocks(make_net())
    inits = nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.trunc_normal_, nn.init.zeros_
    for _ in range(2):  # before there is a root, and afterwards
        for init in inits:
            for net in (model, plain):
                torch.manual_seed(3)
                init(net.embed.weight)
            expect_equal(model, plain)
        for net in (model, plain):
            torch.manual_seed(1)
            with torch.no_grad():
                net.head.weight.normal_(0, 2)
                net.head.bias.exponential_().add_(1)
                net.embed.weight.data.uniform_(-1, 1)
        expect_equal(model, plain)
    with pytest.raises(NotImplementedError, match="sharded"):
        nn.init.orthogonal_(model.embed.weight)
    with pytest.raises(RuntimeError, match="no_grad"):
        model.head.weight.normal_()


@on_ranks(4)
def test_replicas_start_with_equal_values(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    model = shard_blocks(_on_meta(), mesh=mesh).to_empty(device="cpu")
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model(batch_of(rank, 0)).sum().backward()
    states = [None] * 4
    dist.all_gather_object(states, model.full_state_dict())
    for name, value in states[0].items():
        assert all(torch.equal(value, state[name]) for state in states[1:]), name
