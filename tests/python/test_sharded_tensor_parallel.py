"""fully_shard of tensor-parallel (DTensor) parameters, compared with one process."""

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import brigade

from ranks import on_ranks

# (world size, data-parallel ranks)
_SIZES = [(2, 1), (2, 2), (4, 2)]
_ON_SIZES = pytest.mark.parametrize(("world_size", "dp"), _SIZES)
_FULL = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    """Residual MLP, sharded along the sequence outside of the linear layers."""

    def __init__(self, recomputes=False):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.recomputes = recomputes

    def inner(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        if self.recomputes:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


_PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}

_ENTRY = PrepareModuleInput(
    input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
)


class Net(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.blocks = nn.ModuleList(Block(**arguments) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _make(seed=0, **arguments):
    torch.manual_seed(seed)
    return Net(**arguments)


def _mesh(dp):
    sizes = dp, dist.get_world_size() // dp
    return dist.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))


def _shard(net, mesh, wraps=False, **options):
    for index, block in enumerate(net.blocks):
        parallelize_module(block, mesh["tp"], _PLAN)
        if wraps:
            block = net.blocks[index] = checkpoint_wrapper(block)
        brigade.fully_shard(block, mesh=mesh["dp"], **options)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(net, mesh["tp"], {"blocks.0": _ENTRY, "head": head})
    return brigade.fully_shard(net, mesh=mesh["dp"], **options)


def _batch(index, step):
    return torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(10 * step + index))


def _losses_backward(plain, model, mesh, step):
    """Runs a backward of the plain model on all batches, and one of the sharded model."""
    dp = mesh["dp"].size()
    for index in range(dp):
        (plain(_batch(index, step)).square().mean() / dp).backward()
    loss = model(_batch(mesh["dp"].get_local_rank(), step)).square().mean()
    loss.backward()


def _expect_close(found, expected, **tolerances):
    torch.testing.assert_close(dict(found), dict(expected), **tolerances)


def _full(model):
    return {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in model.named_parameters()}


def _expect_equal_models(model, plain, **tolerances):
    found = {name: p.full_tensor().detach() for name, p in _full(model).items()}
    _expect_close(found, {name: p.detach() for name, p in plain.named_parameters()}, **tolerances)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": True, "recomputes": True},
        {"reshard_after_forward": True, "wraps": True},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ],
    ids=["default", "recomputes", "wrapped", "stays", "bfloat16"],
)
@_ON_SIZES
@on_ranks()
def test_training_equals_one_process(rank, world_size, dp, options):
    mesh, options = _mesh(dp), dict(options)
    arguments = {"recomputes": options.pop("recomputes")} if "recomputes" in options else {}
    plain, model = _make(), _shard(_make(**arguments), mesh, **options)
    tolerances = {"rtol": 0.1, "atol": 0.05} if "mp_policy" in options else {}
    _expect_equal_models(model, plain)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5) for net in (plain, model)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _losses_backward(plain, model, mesh, step)
        for name, parameter in _full(model).items():
            gradient = parameter.grad.full_tensor()
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad, **tolerances)
        for order in (1.0, 2.0, float("inf")):
            norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
            found = nn.utils.get_total_norm([p.grad for p in model.parameters()], order)
            torch.testing.assert_close(found, norm, **tolerances)
        clip = nn.utils.clip_grad_norm_
        norm = clip(plain.parameters(), 0.1)
        found = model.clip_grad_norm_(0.1) if step else clip(model.parameters(), 0.1)
        torch.testing.assert_close(found, norm, **tolerances)
        for optimizer in optimizers:
            optimizer.step()
    _expect_equal_models(model, plain, **tolerances)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {}])
@on_ranks(4)
def test_optimizers(rank, options):
    """Without options: each parameter's optimizer steps in backward."""
    mesh = _mesh(2)
    plain, model = _make(), _shard(_make(), mesh)
    first, *others = (torch.optim.AdamW(net.parameters(), 0.1, **options) for net in (plain, model))
    if not options:
        others = []
        for parameter in model.parameters():
            own = torch.optim.AdamW([parameter], 0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    for step in range(2):
        for net in (plain, model):
            net.zero_grad()
        _losses_backward(plain, model, mesh, step)
        for optimizer in (first, *others):
            optimizer.step()
    _expect_equal_models(model, plain)


@on_ranks(4)
def test_compiled_blocks_on_a_mesh_with_replicas(rank):
    names = ("replicate", "dp", "tp")
    mesh = dist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    plain, model = _make(), _make()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        block.compile(backend="aot_eager")
        brigade.fully_shard(block, mesh=mesh["replicate", "dp"])
    brigade.fully_shard(model, mesh=mesh["replicate", "dp"])
    for net in (plain, model):
        net(_batch(0, 0)).square().sum().backward()
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), expected.grad)
    weight = model.blocks[0].up.weight
    assert weight.placements == (Replicate(), Shard(0), Shard(0)) and weight.device_mesh == mesh


@_ON_SIZES
@on_ranks()
def test_checkpoints_have_the_offsets_of_dtensors(rank, world_size, dp):
    """Saved by torch.distributed.checkpoint; loaded unsharded, and with the mesh transposed."""
    mesh = _mesh(dp)
    plain, model = _make(), _shard(_make(), mesh)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in (plain, model)]
    _losses_backward(plain, model, mesh, 0)
    for optimizer in optimizers:
        optimizer.step()
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    saved = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizers[1]),
    }
    dcp.save(saved, checkpoint_id=folders[0])
    whole = {"model": _make(1).state_dict()}
    dcp.load(whole, checkpoint_id=folders[0])
    _expect_close(whole["model"], plain.state_dict())
    other = _shard(_make(1), _mesh(world_size // dp))
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, optimizer)}
    dcp.load(state, checkpoint_id=folders[0])
    set_optimizer_state_dict(other, optimizer, state["optimizer"])
    _expect_equal_models(other, plain)
    states = [
        get_optimizer_state_dict(net, each, options=_FULL)["state"]
        for net, each in ((other, optimizer), (model, optimizers[1]), (plain, optimizers[0]))
    ]
    for found in states[:2]:
        _expect_close(found, states[2])


@_ON_SIZES
@on_ranks()
def test_full_state_dicts(rank, world_size, dp):
    mesh = _mesh(dp)
    plain, model = _make(1), _shard(_make(), mesh)
    expected = copy.deepcopy(plain.state_dict())
    model.load_state_dict(expected)
    _expect_close(model.full_state_dict(), expected, rtol=0, atol=0)
    assert len(model.full_state_dict(rank0_only=True)) == (len(expected) if rank == 0 else 0)
    _expect_close(get_model_state_dict(model, options=_FULL), expected, rtol=0, atol=0)
    of_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    other = _make(2).state_dict()
    set_model_state_dict(model, dict(other) if rank == 0 else {}, options=of_rank0)
    _expect_close(model.full_state_dict(), other, rtol=0, atol=0)
    distributed = {n: distribute_tensor(v, mesh["tp"], [Replicate()]) for n, v in expected.items()}
    model.load_state_dict(distributed)
    _expect_close(model.full_state_dict(), expected, rtol=0, atol=0)
    optimizers = [torch.optim.AdamW(net.parameters()) for net in (plain, model)]
    _losses_backward(plain, model, mesh, 0)
    optimizers[0].step()
    model.zero_grad()
    state = get_optimizer_state_dict(plain, optimizers[0], options=_FULL)
    set_optimizer_state_dict(model, optimizers[1], state, options=_FULL)
    found = get_optimizer_state_dict(model, optimizers[1], options=_FULL)["state"]
    _expect_close(found, state["state"], rtol=0, atol=0)
    moment = optimizers[1].state[model.head.weight]["exp_avg"]
    torch.testing.assert_close(moment.full_tensor(), state["state"]["head.weight"]["exp_avg"])


@_ON_SIZES
@on_ranks()
def test_values_are_those_of_one_process(rank, world_size, dp):
    mesh = _mesh(dp)
    plain, model = _make(), _shard(_make(), mesh)
    for net in (plain, model):
        torch.manual_seed(3)
        net.blocks[0].down.reset_parameters()
        net.head.weight = nn.Parameter(torch.randn_like(net.head.weight))
        with torch.no_grad():
            nn.init.trunc_normal_(net.blocks[1].up.weight)
            torch.Tensor.normal_(net.blocks[1].up.bias)
            net.blocks[2].up.bias.bernoulli_(0.5)
    _expect_equal_models(model, plain, rtol=0, atol=0)
    _losses_backward(plain, model, mesh, 0)
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert own.shape == own.grad.shape == own.size() == expected.shape
        assert own.numel() == own.nelement() == torch.numel(own) == expected.numel()
        assert torch.Tensor.size(own) == expected.shape and len(own) == len(expected)
        assert own.nbytes == expected.nbytes
        for function in (torch.sum, torch.norm, torch.max, torch.mean):
            torch.testing.assert_close(function(own.grad), function(expected.grad))
        assert torch.equal(own.detach(), own.detach().clone())
    gradients = [[p.grad for p in net.parameters()] for net in (model, plain)]
    norms, expected = (torch._foreach_norm(torch._foreach_mul(g, 2.0)) for g in gradients)
    torch.testing.assert_close(list(norms), list(expected))
    weight = model.blocks[0].up.weight
    assert weight.placements == (Shard(0), Shard(0))
    assert weight.device_mesh == mesh
    with model.whole_parameters(writes=True), torch.no_grad():
        assert isinstance(model.blocks[0].up.weight, DTensor)
        model.blocks[0].up.weight.fill_(2)
        x = _batch(0, 0)
        nn.init.constant_(plain.blocks[0].up.weight, 2)
        torch.testing.assert_close(model(x), plain(x))
    assert weight.full_tensor().eq(2).all()


@_ON_SIZES
@on_ranks()
def test_states_load_into_other_placements(rank, world_size, dp):
    """On a mesh whose tensor-parallel dimension comes first."""
    sizes = world_size // dp, dp
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("tp", "dp"))
    styles = (ColwiseParallel(), RowwiseParallel(), None)
    models = []
    for style in styles:
        torch.manual_seed(len(models))
        model = nn.Sequential(nn.Linear(4, 4))
        if style is not None:
            parallelize_module(model, mesh["tp"], {"0": style})
        models.append(brigade.fully_shard(model, mesh=mesh["dp"]))
    assert models[1][0].weight.device_mesh == mesh
    assert models[1][0].weight.placements == (Shard(1), Shard(0))
    for source in models:
        state = source.full_state_dict()
        for model in models:
            model.load_state_dict(source.state_dict())
            _expect_close(model.full_state_dict(), state, rtol=0, atol=0)
        with torch.no_grad():
            models[-1][0].weight.mul_(2)


@_ON_SIZES
@on_ranks()
def test_a_scaler_skips_a_step_on_all_ranks(rank, world_size, dp):
    model = _shard(_make(), _mesh(dp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.full_state_dict()
    scaler.scale(model(_batch(0, 0)).sum()).backward()
    gradient = max((p.grad.to_local() for p in model.parameters()), key=torch.numel)
    if rank == world_size - 1:
        gradient.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2
    _expect_close(model.full_state_dict(), before, rtol=0, atol=0)


@on_ranks()
def test_what_is_not_supported_raises(rank):
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for options in ({}, {"mesh": mesh["tp"]}):
        with pytest.raises(ValueError, match=r"'0\.weight' of Sequential is a DTensor over"):
            model = nn.Sequential(
                parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
            )
            brigade.fully_shard(model, **options)
    assert isinstance(model[0].weight, DTensor)
    model = nn.Linear(4, 4)
    partial = DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()])
    model.weight = nn.Parameter(partial)
    with pytest.raises(
        NotImplementedError, match=r"'weight' of Linear .* only Shard and Replicate"
    ):
        brigade.fully_shard(model, mesh=mesh["dp"])
    for device in ("cpu", "meta"):
        pair = [nn.Linear(4, 4, device=device) for _ in range(2)]
        for linear in pair:
            parallelize_module(linear, mesh["tp"], ColwiseParallel())
        pair[1].weight = pair[0].weight
        brigade.fully_shard(pair[0], mesh=mesh["dp"])
        with pytest.raises(ValueError, match="'weight' of Linear is already 'weight'"):
            brigade.fully_shard(pair[1], mesh=mesh["dp"])
    model = _shard(_make(), mesh)
    for save in (brigade.save_shards, brigade.save_whole, brigade.load_shards, brigade.load_whole):
        with pytest.raises(ValueError, match="tensor-parallel"):
            save(model, "/nowhere/x.safetensors")
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        hooked = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
        getattr(hooked.bias, register)(print)
        with pytest.raises(ValueError, match="'bias' of Linear is a DTensor with hooks"):
            brigade.fully_shard(hooked, mesh=mesh["dp"])
    model = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    optimizer = torch.optim.SGD(model.parameters())
    brigade.fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(RuntimeError, match="Make the optimizer after"):
        optimizer.step()


# (operator, call): `p` and `q` are shards of different layouts, `b` is plain.
_REFUSED = [
    ("add_", lambda p, q, b: b.add_(p)),
    ("add_", lambda p, q, b: p.add_(b)),
    ("lerp_", lambda p, q, b: b.lerp_(p, 0.1)),
    ("copy_", lambda p, q, b: b.copy_(p)),
    ("add", lambda p, q, b: torch.add(b, p)),
    ("add", lambda p, q, b: torch.add(p, p, out=b)),
    ("add", lambda p, q, b: torch.add(p, q)),
    ("add", lambda p, q, b: b.__iadd__(p)),
    ("_foreach_add_", lambda p, q, b: torch._foreach_add_([b], [p])),
    ("_foreach_add_", lambda p, q, b: torch._foreach_add_([p, p], [p, q])),
    ("sum", lambda p, q, b: torch.sum(p, 0, out=b)),
    ("cumsum_", lambda p, q, b: p.cumsum_(0)),
    ("cumsum", lambda p, q, b: p.cumsum(0)),
    ("T", lambda p, q, b: p.T),
    ("__setitem__", lambda p, q, b: p.__setitem__(0, 1.0)),
    ("dropout", lambda p, q, b: nn.functional.dropout(p)),
    ("bernoulli", lambda p, q, b: torch.bernoulli(p)),
    ("normalize", lambda p, q, b: nn.functional.normalize(p, dim=0)),
    ("tolist", lambda p, q, b: p.tolist()),
]


@pytest.mark.parametrize("place", ["outside", "whole_parameters", "forward"])
@_ON_SIZES
@on_ranks()
def test_refused_operators_write_nothing(rank, world_size, dp, place):
    """In forward and whole_parameters() parameters() have shards; operators see DTensors."""
    model = _shard(_make(), _mesh(dp))
    p, q, b = model.blocks[0].up.bias, model.head.bias, torch.zeros(6)
    before = model.full_state_dict()

    def refuse(*_):
        refused = _REFUSED if place == "outside" else [c for c in _REFUSED if c[0].endswith("_")]
        for name, call in refused:
            with torch.no_grad():
                state = torch.get_rng_state()
                with pytest.raises(NotImplementedError, match=name):
                    call(p, q, b)
                assert torch.equal(torch.get_rng_state(), state)

    if place == "outside":
        refuse()
    elif place == "forward":
        model.blocks[1].register_forward_pre_hook(refuse)
        model(_batch(0, 0))
    else:
        with model.whole_parameters(writes=True):
            refuse()
    assert b.eq(0).all()
    _expect_close(model.full_state_dict(), before, rtol=0, atol=0)
