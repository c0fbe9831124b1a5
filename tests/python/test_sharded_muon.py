"""torch.optim.Muon of parameters that ranks hold parts of: one process's, to the last bit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import brigade

from ranks import run_ranks
from sharded_training import batch_of, make_net, shard_blocks, step_of_all

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

_ARGUMENTS = {
    "default": {},
    "plain momentum": {"nesterov": False, "momentum": 0.5, "weight_decay": 0.0},
    "as AdamW": {"adjust_lr_fn": "match_rms_adamw", "lr": torch.tensor(0.02), "ns_steps": 3},
}
_NUM_STEPS = 3


class _Optimizers:
    """Muon of the matrices, and one that goes element by element of the others."""

    def __init__(self, net, arguments) -> None:
        parameters = list(net.parameters())
        self.muon = torch.optim.Muon([p for p in parameters if p.ndim == 2], **arguments)
        others = [p for p in parameters if p.ndim != 2]
        self.others = torch.optim.SGD(others, lr=0.1, foreach=False)

    def step(self) -> None:
        self.muon.step()
        self.others.step()

    def zero_grad(self) -> None:
        self.muon.zero_grad()
        self.others.zero_grad()


def _step(sharded, optimizers, rank, step):
    optimizers.zero_grad()
    sharded(batch_of(rank, step)).square().mean().backward()
    optimizers.step()


def _expect_equal(sharded, plain):
    for name, value in sharded.full_state_dict().items():
        assert torch.equal(value, plain.get_parameter(name)), name


def _trains(rank, world_size, arguments, shard):
    plain, sharded = make_net(), make_net()
    shard(sharded)
    expected, found = _Optimizers(plain, arguments), _Optimizers(sharded, arguments)
    for step in range(_NUM_STEPS):
        _step(sharded, found, rank, step)
        step_of_all(plain, expected, step, world_size)
    _expect_equal(sharded, plain)
    return [tuple(p.shape) for p in sharded.parameters()]


@pytest.mark.parametrize("name", _ARGUMENTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equals_one_process(name, world_size):
    run_ranks(_trains, world_size, _ARGUMENTS[name], shard_blocks, world_size=world_size)


def _shard_whole_matrices(net):
    return shard_blocks(net, block_numel_fn=torch.Tensor.numel)


def test_matrices_may_each_be_on_one_rank():
    for shapes in zip(*run_ranks(_trains, 2, {}, _shard_whole_matrices), strict=True):
        assert sorted(shapes)[0] == (0,) != sorted(shapes)[1]


def _trains_in_rows(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2))
    plain, sharded = make_net(), make_net()
    shard_blocks(sharded, mesh=mesh)
    expected, found = _Optimizers(plain, {}), _Optimizers(sharded, {})
    for step in range(_NUM_STEPS):
        _step(sharded, found, rank, step)
        by_rank = []
        for other in range(4):
            plain.zero_grad()
            plain(batch_of(other, step)).square().mean().backward()
            by_rank.append([p.grad for p in plain.parameters()])
        for parameter, grads in zip(plain.parameters(), zip(*by_rank, strict=True), strict=True):
            parameter.grad = ((grads[0] + grads[1]) + (grads[2] + grads[3])) * 0.25
        expected.step()
    _expect_equal(sharded, plain)


def test_replicas_make_the_same():
    run_ranks(_trains_in_rows, world_size=4)


class _Transposed(nn.Module):
    """Of a matrix whose columns lie one behind the other, and of one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, generator=_generator()).t())
        self.unused = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return x @ self.weight


def _generator():
    return torch.Generator().manual_seed(0)


def _trains_transposed(rank, dtype):
    plain, sharded = _Transposed().to(dtype), _Transposed().to(dtype)
    brigade.fully_shard(sharded)
    expected, found = (torch.optim.Muon(net.parameters()) for net in (plain, sharded))
    x = torch.arange(6.0).view(2, 3).to(dtype)
    for net, optimizer in ((plain, expected), (sharded, found)):
        for _ in range(_NUM_STEPS):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    _expect_equal(sharded, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_matrices_in_any_order_of_memory(dtype):
    run_ranks(_trains_transposed, dtype)


def _resumes(rank):
    nets = [make_net() for _ in range(2)]
    for net in nets:
        shard_blocks(net)
    first, second = (torch.optim.Muon([p for p in n.parameters() if p.ndim == 2]) for n in nets)
    for step in range(2):
        first.zero_grad()
        nets[0](batch_of(rank, step)).square().mean().backward()
        first.step()
    nets[1].load_full_state_dict(nets[0].full_state_dict())
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(nets[0], first, options=options)
    set_optimizer_state_dict(nets[1], second, state, options=options)
    for net, optimizer in zip(nets, (first, second), strict=True):
        optimizer.zero_grad()
        net(batch_of(rank, 2)).square().mean().backward()
        optimizer.step()
    for name, value in nets[1].full_state_dict().items():
        assert torch.equal(value, nets[0].full_state_dict()[name]), name


def test_its_state_is_saved_and_loaded():
    run_ranks(_resumes)
