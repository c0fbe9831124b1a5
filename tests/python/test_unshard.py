"""One unit that is whole while its model trains on."""

import pytest
import torch

import brigade

from ranks import run_ranks
from sharded_training import (
    batch_of,
    expect_equal,
    is_unsharded,
    make_net,
    shard_blocks,
    step_of_all,
)


def _loss(model, rank, step):
    return model(batch_of(rank, step)).square().mean()


def _is_whole(module):
    return [is_unsharded(p) for p in module.parameters(recurse=False)]


def _one_unit(rank, async_op):
    plain, model = make_net(), shard_blocks(make_net())
    block = model.blocks[1]
    handle = block.unshard(async_op=async_op)
    if async_op:
        handle.wait()
        handle.wait()
    else:
        assert handle is None
    assert all(_is_whole(block.up))
    assert torch.equal(block.up.weight, plain.blocks[1].up.weight)
    assert not any(_is_whole(model.head)) and not any(_is_whole(model.blocks[0].up))
    with torch.no_grad():
        block.up.weight.mul_(2)
        plain.blocks[1].up.weight.mul_(2)
    block.reshard(writes=True)
    assert not any(_is_whole(block.up))
    expect_equal(model, plain)
    model.unshard()  # its own
    assert all(_is_whole(model.head)) and not any(_is_whole(block.up))
    model.reshard()
    late = block.unshard(async_op=True)
    block.reshard()
    late.wait()
    assert not any(_is_whole(block.up))


@pytest.mark.parametrize("async_op", [True, False])
def test_one_unit_is_read_and_written(async_op):
    run_ranks(_one_unit, async_op)


def _trains_on(rank, reshards):
    plain, model = make_net(), shard_blocks(make_net(), reshard_after_forward=reshards)
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=0.1, foreach=False) for net in (plain, model)
    ]
    block = model.blocks[1]
    for step in range(5):
        step_of_all(plain, optimizers[0], step, 2)
        optimizers[1].zero_grad()
        if step == 1:
            block.unshard()
        if step == 2:
            block.unshard(async_op=True)
        loss = _loss(model, rank, step)
        assert all(_is_whole(block.up)) == (step in (1, 2) and not reshards)  # as torch's
        if step == 3:
            block.unshard()
            assert all(_is_whole(block.up))
        loss.backward()
        assert not any(_is_whole(block.up))  # the optimizer's, and what norms are of
        optimizers[1].step()
        if step == 4:
            block.unshard()
    block.reshard()
    expect_equal(model, plain)


@pytest.mark.parametrize("reshards", [True, False])
def test_its_model_trains_on_to_the_same_bits(reshards):
    run_ranks(_trains_on, reshards)


def _ahead_in_forward(rank):
    """As torch's users prefetch by hand: each block's hook gathers the next one."""
    plain, model = make_net(), shard_blocks(make_net(), prefetch_depth=0)
    optimizers = [
        torch.optim.SGD(net.parameters(), lr=0.1, foreach=False) for net in (plain, model)
    ]
    for block, following in zip(model.blocks, list(model.blocks)[1:], strict=False):
        block.register_forward_pre_hook(
            lambda *_, following=following: following.unshard(True) and None
        )
    for step in range(3):
        step_of_all(plain, optimizers[0], step, 2)
        optimizers[1].zero_grad()
        _loss(model, rank, step).backward()
        optimizers[1].step()
    expect_equal(model, plain)


def test_gathers_begin_ahead_of_their_need_in_forward():
    run_ranks(_ahead_in_forward)


def _not_on_all_ranks(rank):
    plain, model = make_net(), shard_blocks(make_net())
    words = "unshards unit 'blocks.0'"
    with pytest.raises(RuntimeError, match=words):
        if rank == 0:
            model.blocks[0].unshard()
        else:
            model(batch_of(rank, 0))
    with pytest.raises(RuntimeError, match=words):
        model.blocks[rank].unshard()
    model.blocks[0].unshard()
    if rank == 0:
        model.blocks[0].reshard()  # no communication, so it may differ
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, model)]
    for step in range(2):
        step_of_all(plain, optimizers[0], step, 2)
        _loss(model, rank, step).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert not any(_is_whole(model.blocks[0].up))
    expect_equal(model, plain)


def test_ranks_that_do_something_else_all_raise():
    run_ranks(_not_on_all_ranks)


def _kept_storage(rank):
    model = shard_blocks(make_net())
    model.blocks[1].set_keep_unsharded_storage(True)
    addresses = set()
    up = model.blocks[1].up
    up.register_forward_pre_hook(lambda module, _: addresses.add(module.weight.data_ptr()) and None)
    for step in range(3):
        _loss(model, rank, step).backward()
        model.blocks[1].unshard()
        addresses.add(up.weight.data_ptr())
        model.blocks[1].reshard()
    assert len(addresses) == 1


def test_storage_that_is_kept_has_one_address():
    run_ranks(_kept_storage)


def _without_parameters(rank):
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 1))
    brigade.fully_shard(model[0][0])
    brigade.fully_shard(model[0])
    brigade.fully_shard(model)
    model[0].unshard(async_op=True).wait()
    model[0].reshard()
    with model.whole_parameters():
        model[1].weight.sum()
        model.unshard()  # it is whole
        model.reshard()
        assert all(_is_whole(model[1]))
    assert not any(_is_whole(model[1]))


def test_a_unit_without_parameters_and_one_that_is_whole_anyway():
    run_ranks(_without_parameters)
