"""A sharded net, and an unsharded net of one process to compare it with."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

import brigade


class Block(nn.Module):
    """Residual MLP whose sizes no tested world size divides."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size + 1)
        self.down = nn.Linear(2 * size + 1, size)

    def forward(self, x, scale=None):
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + (y if scale is None else y * scale)


class Net(nn.Module):
    def __init__(self, checkpointed=None) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([Block(7) for _ in range(3)])
        self.head = nn.Linear(7, 2)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            if self.checkpointed is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointed)
        return self.head(x)


def make_net(**arguments):
    torch.manual_seed(0)
    return Net(**arguments)


def batch_of(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def shard_blocks(net, shard=brigade.fully_shard, **arguments):
    """Makes each block an FSDP unit, and the remaining parameters another."""
    for block in net.blocks:
        shard(block, **arguments)
    return shard(net, **arguments)


def replicated(net, **arguments):
    """Makes a unit that is not sharded: every rank holds all parameters."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(), 1))
    return brigade.fully_shard(net, mesh=mesh, **arguments)


def step_of_all(plain, optimizer, step, world_size, without=()):
    """Runs a step in one process: adds the gradients of the ranks' batches in rank order.

    Args:
        without: Ranks without a batch.
    """
    sums = None
    for rank in sorted({*range(world_size)} - {*without}):
        plain.zero_grad()
        loss_of(plain, rank, step).backward()
        gradients = [p.grad for p in plain.parameters()]
        sums = gradients if sums is None else [a + b for a, b in zip(sums, gradients, strict=True)]
    for parameter, gradient in zip(plain.parameters(), sums, strict=True):
        parameter.grad = gradient * (1.0 / world_size)
    optimizer.step()


def loss_of(model, rank, step):
    return model(batch_of(rank, step)).square().mean()


def train_step(model, optimizer, step, rank):
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


class Pair:
    """A sharded net, an unsharded net that trains on all ranks' batches, and their optimizers.

    Args:
        nets: The unsharded and the sharded net; default: make_net(), sharded by
            shard_blocks() with `arguments`.
    """

    def __init__(self, rank, make=torch.optim.SGD, world_size=None, nets=None, **arguments):
        self.rank, self.world_size = rank, world_size or dist.get_world_size()
        self.plain, self.model = nets or (make_net(), shard_blocks(make_net(), **arguments))
        self.optimizers = [
            make(net.parameters(), lr=0.1, foreach=False) for net in (self.plain, self.model)
        ]

    def loss(self, step):
        return loss_of(self.model, self.rank, step)

    def step_plain(self, step):
        step_of_all(self.plain, self.optimizers[0], step, self.world_size)

    def step(self, step):
        self.step_plain(step)
        self.optimizers[1].zero_grad()
        self.loss(step).backward()
        self.optimizers[1].step()

    def expect_equal(self):
        expect_equal(self.model, self.plain)

    def expect_step(self, step):
        self.step(step)
        self.expect_equal()


def is_unsharded(parameter):
    """Returns whether the parameter has an address; a sharded parameter has none."""
    try:
        parameter.data_ptr()
    except RuntimeError:
        return False
    return True


def expect_equal(model, plain):
    state = model.full_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value.cpu()), name  # full states are on the CPU


def full_optimizer_state(model, optimizer, rank0_only=False):
    options = StateDictOptions(full_state_dict=True, cpu_offload=rank0_only)
    return get_optimizer_state_dict(model, optimizer, options=options)


def full_state(model, optimizer):
    """Collective. Returns the full state of a sharded model and of its optimizer."""
    return model.full_state_dict(), full_optimizer_state(model, optimizer)


def expect_same(found, expected, name=""):
    """Expects containers of equal structure, tensors with equal bits, and other values equal."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            expect_same(found[key], value, f"{name}.{key}")
    elif isinstance(expected, (list, tuple)):
        for i, pair in enumerate(zip(found, expected, strict=True)):
            expect_same(*pair, f"{name}.{i}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), name
    else:
        assert found == expected, name


def expect_equal_on_ranks(value):
    """Collective. Expects the value to be equal on all ranks."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    assert all(other == value for other in of_ranks), of_ranks


def expect_equal_losses(rank, *shards):
    """Collective. Expects equal losses of training with each of these functions that shard."""
    results = []
    for shard in shards:
        model = shard_blocks(make_net(), shard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        losses = []
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append(losses)
    assert all(losses == results[0] for losses in results)
