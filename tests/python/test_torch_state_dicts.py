"""torch's get_state_dict() and set_state_dict() of full states, with sharded modules."""

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from cases import pairwise
from ranks import on_ranks
from sharded_training import expect_same, make_net, shard_blocks, train_step


def _sharded(device=None):
    if device is None:
        return shard_blocks(make_net())
    with torch.device(device):
        return shard_blocks(make_net())


@pairwise(
    world_size=[2, 3],
    is_on_meta=[False, True],
    broadcasts=[False, True],
)
@on_ranks()
def test_training_resumes_from_a_full_state(rank, broadcasts, is_on_meta, world_size):
    first = _sharded()
    optimizer = torch.optim.AdamW(first.parameters())
    for step in range(2):
        train_step(first, optimizer, step, rank)
    whole = StateDictOptions(full_state_dict=True)
    model_state = get_model_state_dict(first, options=whole)
    optimizer_state = get_optimizer_state_dict(first, optimizer, options=whole)
    if broadcasts and rank != 0:
        model_state, optimizer_state = {}, {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcasts)
    second = _sharded("meta" if is_on_meta else None)
    set_model_state_dict(second, model_state, options=options)
    other = torch.optim.AdamW(second.parameters())
    set_optimizer_state_dict(second, other, optimizer_state, options=options)
    for net, stepping in ((first, optimizer), (second, other)):
        train_step(net, stepping, 2, rank)
    expect_same(second.full_state_dict(), first.full_state_dict())


@on_ranks()
def test_torchs_gathering_function_returns_full_tensors(rank):
    model = _sharded()
    full = model.full_state_dict()
    state = model.state_dict()
    expect_same(_state_dict_utils._gather_state_dict(state), full)
    gathered = _state_dict_utils._gather_state_dict(state, cpu_offload=True, ranks_only=(0,))
    expect_same(gathered, full if rank == 0 else {})
