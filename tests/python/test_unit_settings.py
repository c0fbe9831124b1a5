"""Settings of sharded modules between steps, under the names of torch's fully_shard."""

from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

import brigade
from brigade._sharded_units import unit_of

from ranks import on_ranks
from sharded_training import Pair, batch_of, loss_of, make_net, shard_blocks, step_of_all


def _gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def _expect_same(found, expected, factor=1.0):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b * factor)


@on_ranks(4)
def test_numbers_of_neighbours(rank):
    for wrong in (0, -2, 3, 8, 2.0, "2"):
        with pytest.raises(ValueError, match=r"Pass one of \[1, 2, 4\]"):
            brigade.fully_shard(make_net(), reshard_after_forward=wrong)
    model = shard_blocks(make_net())
    model(batch_of(rank, 0))
    model.blocks[0].set_reshard_after_forward(2)
    with pytest.raises(RuntimeError, match=r"'blocks\.0': expected reshard_after_forward"):
        model(batch_of(rank, 0))
    model.set_reshard_after_forward(True)
    loss_of(model, rank, 0).backward()


class _Offset(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x + self.offset


@on_ranks()
def test_a_last_unit_that_makes_the_output_is_gathered_once_in_backward(rank):
    layers = (torch.nn.Linear(4, 4) for _ in range(3))
    model = torch.nn.Sequential(*layers)
    for layer in list(model)[1:]:
        brigade.fully_shard(layer)
    brigade.fully_shard(model)
    for keeps, expected in ((False, ["2", "1"]), (True, ["1"])):
        model[2].set_reshard_after_forward(not keeps)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        gathers = model.sharding_timeline().gathers
        assert [gather.unit for gather in gathers if not gather.is_in_forward] == expected


@on_ranks()
def test_backward_without_a_gather(rank):
    model = torch.nn.Sequential(_Offset(), torch.nn.Linear(4, 1))
    first = model[0]
    brigade.fully_shard(first, prefetch_depth=0)
    brigade.fully_shard(model, prefetch_depth=0)
    x = torch.ones(2, 4, requires_grad=True)

    def gathered_in_backward():
        model(x).sum().backward()
        gathers = model.sharding_timeline().gathers
        return [gather.unit for gather in gathers if not gather.is_in_forward]

    assert gathered_in_backward() == ["0"]
    gradients = _gradients(model)
    first.set_unshard_in_backward(False)
    assert gathered_in_backward() == []
    _expect_same(_gradients(model), gradients, 2)


@on_ranks()
def test_units_are_kept_within_a_budget(rank):
    model = shard_blocks(make_net())

    def gathered_in_backward():
        loss_of(model, rank, 0).backward()
        gathers = model.sharding_timeline().gathers
        return {gather.unit for gather in gathers if not gather.is_in_forward}

    gathered = gathered_in_backward()
    assert gathered
    assert model.keep_unsharded(0) == []
    assert set(model.keep_unsharded(2**30)) == gathered
    assert gathered_in_backward() == set()


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks()
def test_finalization_by_hand(rank, async_op):
    pair = Pair(rank)
    model = pair.model
    model.finalize_backward()  # no effect before the first forward
    model.set_manual_backward_finalization(True)
    for step in range(3):
        pair.step_plain(step)
        loss_of(model, rank, step).backward()
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(False)
        model.finalize_backward()
        assert all(p.grad is None for p in model.parameters())
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=async_op)
        assert (handle is None) == (not async_op)
        if async_op:
            handle.wait()
        pair.optimizers[1].step()
        model.zero_grad()
    pair.expect_equal()


@on_ranks()
def test_the_next_forward_waits_for_an_event_once(rank):
    model = shard_blocks(make_net())
    for _ in range(2):
        event = mock.Mock()
        model.set_post_optim_event(event)
        for _ in range(2):
            loss_of(model, rank, 0).backward()
            assert event.wait.call_count == 1


def _step(pair, step, has_data, without):
    """Trains both nets; `without`: the ranks without data."""
    step_of_all(pair.plain, pair.optimizers[0], step, 2, without=without)
    pair.optimizers[1].zero_grad()
    if has_data:
        pair.loss(step).backward()
    else:
        pair.model.step_without_data()
    pair.optimizers[1].step()


@on_ranks()
def test_ranks_run_out_of_data(rank):
    num_batches = (4, 2)
    pair = Pair(rank)
    step = 0
    while pair.model.num_ranks_with(step < num_batches[rank]):
        _step(pair, step, step < num_batches[rank], without=[1] if step >= 2 else [])
        step += 1
    assert step == 4
    pair.expect_equal()


@on_ranks()
def test_a_rank_without_data_follows_a_schedule_of_its_peer_alone(rank):
    pair = Pair(rank)
    output = pair.model(batch_of(rank, 0))  # rank 1 keeps its graph: schedules of its own
    if rank == 0:
        del output
    for step in range(3):
        has_data = rank == 0 or step == 0
        _step(pair, step, has_data, without=[1] if step else [])
    pair.expect_equal()


@on_ranks()
def test_a_rank_without_data_evaluates_with_its_peer(rank):
    pair = Pair(rank, reshard_after_forward=False)
    for step in range(3):
        if rank == 0:
            with torch.no_grad():
                pair.loss(step)
        _step(pair, step, rank == 0, without=[1])
    pair.expect_equal()


@on_ranks()
def test_a_plain_tensor_on_one_rank_is_an_error_on_all(rank):
    for has_run in (False, True):
        model = shard_blocks(make_net())
        if has_run:
            loss_of(model, rank, 0).backward()
        part = model.head.weight
        own = part.data
        if rank == 0:
            part.data = torch.zeros(part.shape)
        with pytest.raises((RuntimeError, ValueError), match=r"'head\.weight' was given a plain"):
            loss_of(model, rank, 0).backward()
    part.data = own * 2 if rank == 0 else own
    loss_of(model, rank, 1).backward()
    assert part.grad is not None
    begin = brigade._C.offset_of(part)
    end = begin + part.to_local().numel()
    expected = make_net().head.weight.flatten()[begin:end] * (2 if rank == 0 else 1)
    assert torch.equal(part.to_local(), expected)


@on_ranks()
def test_a_unit_that_differs_on_one_rank_is_an_error_on_all(rank):
    model = shard_blocks(make_net())
    for setter in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        getattr(model.blocks[0], setter)(rank == 0)
        with pytest.raises(ValueError, match=r"(?s)setting .* of unit 'blocks\.0' differs.*rank"):
            loss_of(model, rank, 0).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, rank, 0).backward()
        assert all(gradient is not None for gradient in _gradients(model))
        model.zero_grad()


@on_ranks()
def test_blocks_are_set_before_the_first_forward(rank):
    model = shard_blocks(make_net(), prefetch_depth=0)
    first, second, _ = model.blocks
    first.set_reduce_scatter_max_input_buffers(1)
    for module in (first, second):
        with pytest.raises(RuntimeError, match="a sharded Block inside of a sharded Net"):
            module.set_manual_backward_finalization(True)
    first.set_modules_to_forward_prefetch([second])  # creates the root `model`
    assert unit_of(first).root.outermost is unit_of(model)
    loss_of(model, rank, 0).backward()
    with pytest.raises(RuntimeError, match="finalize_backward: expected the outermost"):
        first.finalize_backward()


def test_no_method_uses_torchs_own_fsdp_state():
    theirs = {name for name, value in vars(TorchFSDPModule).items() if callable(value)}
    assert "reshard" in theirs
    assert theirs - set(vars(brigade.FSDPModule)) == set()


@on_ranks()
def test_settings_without_meaning_have_no_effect(rank):
    model, other = shard_blocks(make_net()), shard_blocks(make_net())
    model.set_reduce_scatter_unused_params(True)
    model.blocks[0].set_reduce_scatter_unused_params(True, recurse=False)
    model.set_force_sum_reduction_for_comms(True)
    brigade.share_comm_ctx([model, other])
    with brigade.install():
        torch.distributed.fsdp.share_comm_ctx([model, other])
    for each in (model, other):
        loss_of(each, rank, 0).backward()
    _expect_same(_gradients(model), _gradients(other))


@on_ranks()
def test_gradients_of_autograd_grad_accumulate(rank):
    pair = Pair(rank)
    parts, wholes = list(pair.model.parameters()), list(pair.plain.parameters())
    unsharded = torch.zeros(parts[0].shape, dtype=parts[0].dtype)
    with pytest.raises(RuntimeError, match="before the first forward"):
        parts[0].grad = unsharded
    pair.step(0)
    for net in (pair.plain, pair.model):
        net.zero_grad()
    with pytest.raises(RuntimeError, match=r"unsharded tensor, .*\n.*set_requires_gradient_sync"):
        parts[0].grad = unsharded
    pair.model.set_requires_gradient_sync(False)
    with pytest.raises(ValueError, match="expected a gradient of shape"):
        parts[0].grad = torch.zeros(1, dtype=parts[0].dtype)
    for step in range(2):
        for part, value in zip(parts, torch.autograd.grad(pair.loss(step), parts), strict=True):
            part.grad = value
            assert part.grad is None
    pair.model.set_requires_gradient_sync(True)
    pair.loss(2).backward()
    for step in range(3):
        for other in range(pair.world_size):
            loss_of(pair.plain, other, step).div(pair.world_size).backward()
    for part, whole in zip(parts, wholes, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), whole.grad)
