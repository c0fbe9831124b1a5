"""What torch's fully_shard has and brigade lacks: an error that names it, and all goes on."""

import inspect

import pytest
from torch.distributed import fsdp

import brigade

from ranks import run_ranks
from sharded_training import batch_of, make_net, shard_blocks

METHODS = (
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_symm_mem_for_comm",
)
ARGUMENTS = {
    "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False),
}


def test_fully_shard_takes_all_of_torchs_arguments():
    ours, theirs = (inspect.signature(s.fully_shard).parameters for s in (brigade, fsdp))
    assert set(theirs) <= set(ours)


def _train(model, rank):
    model(batch_of(rank, 0)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def _call(rank, name, args, kwargs):
    model = shard_blocks(make_net())
    for module in (model, model.blocks[0]):
        with pytest.raises(NotImplementedError, match=rf"fully_shard.*{name}\("):
            getattr(module, name)(*args, **kwargs)
        _train(model, rank)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_lacking_is_named(name):
    own = inspect.signature(getattr(fsdp.FSDPModule, name)).parameters.values()
    required = [p for p in own if p.name != "self" and p.default is p.empty]
    run_ranks(_call, name, (None,) * len(required), {})


def _shard_with(rank, name):
    model = make_net()
    with pytest.raises(NotImplementedError, match=f"fully_shard: {name}"):
        brigade.fully_shard(model.blocks[0], **{name: ARGUMENTS[name]})
    _train(shard_blocks(model), rank)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_is_lacking_is_named(name):
    run_ranks(_shard_with, name)
