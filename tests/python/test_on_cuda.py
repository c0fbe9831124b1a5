"""Training on a CUDA device: over NCCL on one rank, and over Gloo on ranks that share it.

tests/simulated_device has the other tests of devices with streams.
"""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import brigade

from ranks import on_ranks
from sharded_training import Net, shard_blocks
from whole_numbers import backward_of_all

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda", 0)
MODES = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.001},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "reproducible": {"reproducible": True},
}
STRATEGIES = {"reshard": True, "keep": False}


class WithUnused(nn.Module):
    """A net with a layer that every other forward skips."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.at_times = nn.Linear(2, 2)

    def forward(self, x, uses=True):
        x = self.net(x)
        return self.at_times(x) if uses else x


def _make(make=Net):
    torch.manual_seed(0)
    with DEVICE:
        return make()


def _batch_of(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)


def _busy():
    torch.cuda._sleep(8_000_000_000)


def _expect_same(model, plain):
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(1, backend="nccl")
def test_bits_over_nccl_equal_one_process(rank, mode):
    options = MODES[mode]
    uses_all = not options.get("find_unused_parameters", False)
    plain = _make(WithUnused)
    wrapped = brigade.DistributedDataParallel(copy.deepcopy(plain), device_ids=[0], **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, wrapped)]
    for step in range(6):
        uses = uses_all or step % 2 == 0
        for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
            optimizer.zero_grad()
            model(_batch_of(rank, step), uses).square().mean().backward()
            optimizer.step()
        _expect_same(wrapped, plain)


@pytest.mark.parametrize("kind", ["copies", "views", "static_graph", "small buckets", *STRATEGIES])
@on_ranks(1, backend="nccl")
def test_the_host_never_waits_over_nccl(rank, kind):
    model = _make()
    if kind in STRATEGIES:
        model = shard_blocks(model, reshard_after_forward=STRATEGIES[kind])
    else:
        model = brigade.DistributedDataParallel(model, **MODES[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    x = _batch_of(rank, 0)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    _busy()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("default")
    assert not torch.cuda.current_stream().query(), "a step has waited for the device"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@on_ranks(1, backend="nccl")
def test_sharded_bits_over_nccl_equal_one_process(rank, strategy, low):
    reshards = STRATEGIES[strategy]
    plain = _make()
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    model = shard_blocks(copy.deepcopy(plain), reshard_after_forward=reshards, mp_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(5):
        casts = copy.deepcopy(plain).to(low or torch.float32)
        casts(_batch_of(rank, step).to(low or torch.float32)).square().mean().backward()
        for parameter, cast in zip(plain.parameters(), casts.parameters(), strict=True):
            parameter.grad = cast.grad.float()
        optimizers[1].zero_grad()
        model(_batch_of(rank, step)).square().mean().backward()
        norms = [
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5),
            nn.utils.clip_grad_norm_(model.parameters(), 0.5),
        ]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.view(-1), theirs.view(-1))


@pytest.mark.parametrize("has_mesh", [True, False])
@on_ranks(1, backend="nccl")
def test_modules_on_the_cpu_move_to_their_mesh(rank, has_mesh):
    torch.manual_seed(0)
    sharded = Net()
    plain = copy.deepcopy(sharded).to(DEVICE)
    sharded.ignored = nn.Parameter(torch.ones(1))
    sharded.register_buffer("kept", torch.ones(3))
    parameter = sharded.ignored
    mesh = init_device_mesh("cuda", (1,)) if has_mesh else None
    for block in sharded.children():
        brigade.fully_shard(block, mesh=mesh)
    brigade.fully_shard(sharded, mesh=mesh, ignored_params={parameter})
    assert sharded.kept.device == DEVICE
    assert sharded.ignored is parameter and not parameter.is_cuda
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, sharded)]
    for step in range(3):
        for model, optimizer in zip((plain, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            model(_batch_of(rank, step)).square().mean().backward()
            optimizer.step()
    wholes = sharded.full_state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(wholes[name].to(DEVICE), parameter.data, rtol=0, atol=0)


@on_ranks(1, backend="nccl")
def test_install_shards_on_devices(rank):
    from torch.distributed.fsdp import FSDPModule

    with brigade.install():
        for mesh in (None, init_device_mesh("cuda", (1,))):
            for device in ("cuda", "cpu", "meta"):
                module = torch.distributed.fsdp.fully_shard(
                    nn.Linear(2, 2, device=device), mesh=mesh
                )
                assert isinstance(module, brigade.FSDPModule)
                assert isinstance(module, FSDPModule)
                if device == "meta":
                    module.to_empty(device="cuda")
                loss = module(torch.ones(2, device="cuda")).sum()
                loss.backward()
                assert module.weight.device == DEVICE and module.weight.grad.device == DEVICE


@on_ranks(1, backend="nccl")
def test_compiled_over_nccl(rank):
    plain = _make()
    wrapped = torch.compile(brigade.DistributedDataParallel(copy.deepcopy(plain)))
    for step in range(3):
        plain.zero_grad()
        wrapped.zero_grad()
        plain(_batch_of(rank, step)).square().mean().backward()
        wrapped(_batch_of(rank, step)).square().mean().backward()
        for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", ["copies", "views", "static_graph"])
@on_ranks(1, backend="nccl")
def test_captured_in_a_cuda_graph(rank, mode):
    """Captures as torch's class requires: on a side stream, after 11 steps."""
    options = MODES[mode]
    torch.cuda.set_stream(torch.cuda.Stream())
    model = brigade.DistributedDataParallel(_make(), **options)
    plain = _make()
    x = _batch_of(rank, 0)
    for _ in range(11):
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
    for step in range(1, 4):
        x.copy_(_batch_of(rank, step))
        graph.replay()
        plain.zero_grad()
        plain(_batch_of(rank, step)).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", MODES)
@on_ranks()
def test_ranks_that_share_a_device(rank, mode):
    options = MODES[mode]
    torch.cuda.set_device(DEVICE)
    plain = _make(WithUnused)
    wrapped = brigade.DistributedDataParallel(copy.deepcopy(plain), **options)
    for step in range(4):
        uses = [not options.get("find_unused_parameters") or (step + r) % 3 != 0 for r in (0, 1)]

        def loss_on(net, r, step=step, uses=uses):
            return net(_batch_of(r, step), uses[r]).square().mean()

        for net in (plain, wrapped):
            net.zero_grad()
        backward_of_all(plain, 2, loss_on)
        loss_on(wrapped, rank).backward()
        _expect_same(wrapped, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks()
def test_shards_of_ranks_that_share_a_device(rank, strategy):
    reshards = STRATEGIES[strategy]
    torch.cuda.set_device(DEVICE)
    plain = _make()
    model = shard_blocks(copy.deepcopy(plain), reshard_after_forward=reshards)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(4):

        def loss_on(net, r, step=step):
            return net(_batch_of(r, step)).square().mean()

        for optimizer in optimizers:
            optimizer.zero_grad()
        backward_of_all(plain, 2, loss_on)
        loss_on(model, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
    for part, whole in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(part.full_tensor(), whole)
