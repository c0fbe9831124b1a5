"""A unit that is unsharded while its model trains."""

import pytest

from ranks import on_ranks
from sharded_training import Pair, batch_of, is_unsharded, loss_of, make_net, shard_blocks


def _is_whole(module):
    return [is_unsharded(p) for p in module.parameters(recurse=False)]


@on_ranks()
def test_all_ranks_raise_unless_all_unshard_the_same_unit(rank):
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
        model.blocks[0].reshard()  # local, so ranks may differ
    for step in range(2):
        pair.step(step)
        assert not any(_is_whole(model.blocks[0].up))
    pair.expect_equal()


@on_ranks()
def test_kept_storage_keeps_its_address(rank):
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
