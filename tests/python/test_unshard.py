"""One unit that is whole while its model trains on."""

import pytest
import torch

import brigade

from ranks import on_ranks
from sharded_training import Pair, batch_of, is_unsharded, loss_of, make_net, shard_blocks


def _is_whole(module):
    return [is_unsharded(p) for p in module.parameters(recurse=False)]


@pytest.mark.parametrize("reshards", [True, False])
@on_ranks()
def test_its_model_trains_on_to_the_same_bits(rank, reshards):
    pair = Pair(rank, reshard_after_forward=reshards)
    block = pair.model.blocks[1]
    for step in range(5):
        pair.step_plain(step)
        pair.optimizers[1].zero_grad()
        if step == 1:
            block.unshard()
        if step == 2:
            block.unshard(async_op=True)
        loss = pair.loss(step)
        assert all(_is_whole(block.up)) == (step in (1, 2) and not reshards)  # as torch's
        if step == 3:
            block.unshard()
            assert all(_is_whole(block.up))
        loss.backward()
        assert not any(_is_whole(block.up))  # the optimizer's, and what norms are of
        pair.optimizers[1].step()
        if step == 4:
            block.unshard()
    block.reshard()
    pair.expect_equal()


@on_ranks()
def test_ranks_that_do_something_else_all_raise(rank):
    pair = Pair(rank)
    model = pair.model
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
    for step in range(2):
        pair.step(step)
        assert not any(_is_whole(model.blocks[0].up))
    pair.expect_equal()


@on_ranks()
def test_storage_that_is_kept_has_one_address(rank):
    model = shard_blocks(make_net())
    model.blocks[1].set_keep_unsharded_storage(True)
    addresses = set()
    up = model.blocks[1].up
    up.register_forward_pre_hook(lambda module, _: addresses.add(module.weight.data_ptr()) and None)
    for step in range(3):
        loss_of(model, rank, step).backward()
        model.blocks[1].unshard()
        addresses.add(up.weight.data_ptr())
        model.blocks[1].reshard()
    assert len(addresses) == 1


@on_ranks()
def test_a_unit_without_parameters_and_one_that_is_whole_anyway(rank):
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
