"""An exception on one rank in a sharded step: all ranks raise, change nothing and continue."""

import contextlib
import resource

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import brigade

from exact_training import SumOverRanks, UserError
from ranks import on_ranks, run_ranks
from sharded_training import Net, Pair, batch_of, expect_equal_on_ranks, make_net, shard_blocks


class _Pair(Pair):
    """A Pair that checks that a failure changes no shards and gradients."""

    def kept(self):
        return [
            (p, p.to_local().clone(), None if p.grad is None else p.grad.to_local().clone())
            for p in self.model.parameters()
        ]

    def expect_kept(self, kept):
        found = list(self.model.parameters())
        assert len(found) == len(kept)
        for parameter, (same, part, gradient) in zip(found, kept, strict=True):
            assert parameter is same and isinstance(parameter, brigade.ShardedParameter)
            assert torch.equal(parameter.to_local(), part)
            if gradient is None:
                assert parameter.grad is None
            else:
                assert torch.equal(parameter.grad.to_local(), gradient)


def _raises(error):
    def hook(*_):
        raise error

    return hook


def _in_backward_of(module, error):
    return module.register_forward_hook(
        lambda module, args, output: output.register_hook(_raises(error)) and None
    )


# Functions that make a rank raise, by place; they return a handle.
PLACES = {
    "forward of the outermost": lambda m, e: m.register_forward_pre_hook(_raises(e)),
    "forward, before a gather": lambda m, e: m.blocks[1].register_forward_pre_hook(
        _raises(e), prepend=True
    ),
    "forward, whole": lambda m, e: m.blocks[1].down.register_forward_pre_hook(_raises(e)),
    "forward, at its end": lambda m, e: m.head.register_forward_hook(_raises(e)),
    "backward, at its begin": lambda m, e: _in_backward_of(m, e),
    "backward, in the middle": lambda m, e: _in_backward_of(m.blocks[1].up, e),
    "backward, at its end": lambda m, e: _in_backward_of(m.embed, e),
}


def _fails(rank, places, error, arguments):
    """Fails in each of these places of one model, in every second step."""
    pair = _Pair(rank, torch.optim.AdamW, **arguments)
    failing = dist.get_world_size() - 1
    errors = {}
    for number, place in enumerate(places):
        pair.optimizers[1].zero_grad()
        kept = pair.kept()
        if rank == failing:
            handle = PLACES[place](pair.model, error("no such batch"))
        with pytest.raises(error if rank == failing else RuntimeError) as caught:
            pair.loss(number).backward()
        if rank == failing:
            handle.remove()
        errors[place] = str(caught.value)
        if error is KeyboardInterrupt:
            pair.model.reset_iter_state()  # forward hooks did not run
        pair.expect_kept(kept)
        pair.expect_step(number)
    return errors


def _expect_failures(places, error, world_size, arguments):
    *others, own = run_ranks(_fails, places, error, arguments, world_size=world_size)
    assert own == dict.fromkeys(places, "no such batch")
    assert others == others[:1] * (world_size - 1)
    for place, text in others[0].items():
        assert f"rank {world_size - 1}" in text, (place, text)
    return others[0]


@pytest.mark.parametrize(("world_size", "reshards"), [(3, True), (3, False), (4, 2)])
def test_all_ranks_raise_and_continue_exactly(world_size, reshards):
    arguments = {"reshard_after_forward": reshards}
    errors = _expect_failures(list(PLACES), UserError, world_size, arguments)
    for place, text in errors.items():
        if place.startswith("forward"):
            assert "UserError: no such batch" in text, (place, text)


def test_an_interrupt_of_one_rank():
    _expect_failures(["forward, whole", "backward, in the middle"], KeyboardInterrupt, 2, {})


class _WithoutTextError(Exception):
    def __str__(self):
        raise AttributeError("no text")


@on_ranks()
def test_errors_whose_text_cannot_be_sent(rank):
    pair = _Pair(rank, torch.optim.AdamW)
    expected = {
        r"ValueError: caf\udce9": ValueError("caf\udce9"),
        "_WithoutTextError": _WithoutTextError(),
    }
    for step, (text, error) in enumerate(expected.items()):
        if rank == 1:
            handle = PLACES["forward, whole"](pair.model, error)
        with pytest.raises(type(error) if rank == 1 else RuntimeError) as caught:
            pair.loss(step)
        if rank == 1:
            handle.remove()
        else:
            assert text in str(caught.value)
        pair.expect_step(step)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_a_backward_that_one_rank_skips(rank, world_size):
    pair = _Pair(rank, torch.optim.AdamW)
    pair.expect_step(0)
    pair.optimizers[1].zero_grad()
    kept = pair.kept()
    loss = pair.loss(1)
    with pytest.raises(RuntimeError) as caught:
        if rank == 0:
            pair.loss(1)  # the next forward, while peers are in backward
        else:
            loss.backward()
    pair.expect_kept(kept)
    for step in range(1, 3):
        pair.expect_step(step)
    expect_equal_on_ranks(str(caught.value))
    others = "rank 1" if world_size == 2 else "ranks 1, 2"
    assert "rank 0 began the forward of step 2" in str(caught.value)
    assert f"{others} began the backward of step 2" in str(caught.value)


@on_ranks()
def test_an_optimizers_hook_that_raises_before_the_step(rank):
    """Steps are local: the rank that raised steps again."""
    pair = _Pair(rank, torch.optim.AdamW)
    pair.expect_step(0)
    for step in range(1, 3):
        pair.step_plain(step)
        pair.optimizers[1].zero_grad()
        pair.loss(step).backward()
        if rank == 1:
            kept = pair.kept()
            handle = pair.optimizers[1].register_step_pre_hook(_raises(UserError("no disk")))
            with pytest.raises(UserError, match="no disk"):
                pair.optimizers[1].step()
            handle.remove()
            pair.expect_kept(kept)
        pair.optimizers[1].step()
        pair.expect_equal()


class _Writes(nn.Module):
    """Writes its weight in forward, on request."""

    def __init__(self, inner=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.inner = inner
        self.writes = False

    def forward(self, x):
        if self.writes:
            with torch.no_grad():
                self.weight.mul_(2)
        x = x * self.weight
        return x if self.inner is None else self.inner(x)


@pytest.mark.parametrize("is_outermost", [False, True])
@on_ranks()
def test_a_write_in_forward_on_one_rank_is_an_error_on_all(rank, is_outermost):
    model = _Writes(_Writes())
    brigade.fully_shard(model.inner)
    brigade.fully_shard(model)
    model(torch.ones(4)).sum().backward()
    writer = model if is_outermost else model.inner
    writer.writes = rank == 1
    error = NotImplementedError if rank == 1 else dist.DistBackendError
    with pytest.raises(error, match="in a forward or backward, where it would be lost"):
        model(torch.ones(4)).sum().backward()
    writer.writes = False
    assert isinstance(model.inner.weight, brigade.ShardedParameter)
    model.zero_grad()
    model(torch.ones(4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(4))


@on_ranks(3)
def test_an_evaluation_that_fails_on_one_rank(rank):
    pair = _Pair(rank)
    for step, place in enumerate(name for name in PLACES if name.startswith("forward")):
        pair.expect_step(step)
        kept = pair.kept()
        if rank == 2:
            handle = PLACES[place](pair.model, UserError("no such batch"))
        error = UserError if rank == 2 else dist.DistBackendError
        with torch.no_grad(), pytest.raises(error, match="no such batch"):
            pair.model(batch_of(rank, step))
        if rank == 2:
            handle.remove()
        pair.expect_kept(kept)
    pair.expect_step(step + 1)


class _AroundAll(Net):
    def forward(self, x):
        x = checkpoint(self._run_blocks, self.embed(x), use_reentrant=self.checkpointed)
        return self.head(x)

    def _run_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _raise_in_backward(*_):
    if torch._C._current_graph_task_id() != -1:
        raise UserError("no such batch")


@pytest.mark.parametrize("kind", [Net, _AroundAll])
@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks()
def test_a_recomputation_that_fails_on_one_rank(rank, kind, use_reentrant):
    def make():
        torch.manual_seed(0)
        return kind(checkpointed=use_reentrant)

    pair = _Pair(rank, nets=(make(), shard_blocks(make())))
    for step in range(2):
        pair.optimizers[1].zero_grad()
        kept = pair.kept()
        if rank == 1:
            handle = pair.model.blocks[1].down.register_forward_pre_hook(_raise_in_backward)
        with pytest.raises(UserError if rank == 1 else dist.DistBackendError):
            pair.loss(step).backward()
        if rank == 1:
            handle.remove()
        pair.expect_kept(kept)
        pair.expect_step(step)


def _sum_in_forward(module, args, output):
    dist.all_reduce(output.detach().clone())


def _sum_in_backward(module, args, output):
    return SumOverRanks.apply(output)


@pytest.mark.parametrize("collective", [_sum_in_forward, _sum_in_backward])
@on_ranks(3, timeout_s=3, deadline_s=60)
def test_peers_in_their_own_collective_raise_at_the_timeout(rank, collective):
    model = shard_blocks(make_net())
    handle = model.blocks[1].register_forward_hook(collective)
    for step in range(2):
        model(batch_of(rank, step)).sum().backward()
    if rank == 2:
        handle.remove()
        if collective is _sum_in_forward:
            handle = model.blocks[1].register_forward_hook(_raises(UserError("no such batch")))
        else:
            handle = _in_backward_of(model.head, UserError("no such batch"))
    with pytest.raises(UserError if rank == 2 else RuntimeError):
        model(batch_of(rank, 2)).sum().backward()
    handle.remove()
    with pytest.raises(RuntimeError, match=r"can't continue|rank 2 has stopped waiting"):
        model(batch_of(rank, 3)).sum().backward()
    dist.destroy_process_group()


@contextlib.contextmanager
def _memory_limit():
    """Context with a function that limits this process to 12 MiB of additional memory."""

    def limit(*_):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (12 << 20), hard))

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    ("place", "steps_before"),
    [("forward", 0), ("forward", 3), ("gradient", 0), ("gradient", 3)],
)
@on_ranks()
def test_one_rank_runs_out_of_memory(rank, place, steps_before):
    """A unit takes 160 MiB and its shard 80, more than malloc caches."""

    def make():
        torch.manual_seed(0)
        sizes = (8, 1 << 17), (1 << 17, 320), (320, 1)
        return nn.Sequential(*[nn.Linear(*size, bias=False) for size in sizes])

    model = make()
    for layer in model:
        brigade.fully_shard(layer)
    brigade.fully_shard(model)
    x = torch.full((1, 8), rank + 1.0)
    kept = []  # the next gradients need new memory
    for _ in range(steps_before):
        model(x).sum().backward()
        kept[:] = [p.grad for p in model.parameters()]
        model.zero_grad()
    with _memory_limit() as limit:
        if rank == 1 and place == "forward":
            handle = model[1].register_forward_pre_hook(limit, prepend=True)
        elif rank == 1:
            handle = model[1].weight.register_hook(limit)
        words = "can't allocate memory" if rank == 1 else "rank 1 failed"
        with pytest.raises(RuntimeError, match=words) as caught:
            model(x).sum().backward()
        if rank == 1:
            handle.remove()
            assert not isinstance(caught.value, dist.DistBackendError)
    assert all(p.grad is None for p in model.parameters())
    model(x).sum().backward()
    plain = make()
    plain(torch.full((1, 8), 1.5)).sum().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
