"""Modules or arguments of fully_shard that differ between ranks: the same error on all ranks."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import brigade

from ranks import on_ranks
from sharded_training import Pair, batch_of, expect_equal_on_ranks, make_net

TIMEOUT_S = 20  # a rank that waits for one that has raised fails earlier


def _expect_exact_steps(rank, count=2):
    """Expects exact steps, so the group still works."""
    pair = Pair(rank)
    for step in range(count):
        pair.step(step)
    pair.expect_equal()


def _two(first, second):
    return nn.Sequential(nn.Linear(*first), nn.Linear(*second))


# By difference: rank 0's module, the others' module, regex of the error.
MODULES = {
    "sizes": (
        lambda: _two((4, 6), (6, 2)),
        lambda: _two((4, 5), (5, 2)),
        r"fully_shard: parameter '0\.weight' of unit '.*' differs between ranks:\n"
        r"  rank 0: float32, shape \[6, 4\], on cpu.*\n  ranks 1, 2: float32, shape \[5, 4\]",
    ),
    "number of parameters": (
        lambda: _two((4, 4), (4, 4)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)),
        r"fully_shard: parameter 3 differs between ranks:\n  rank 0: '1\.bias'.*\n"
        r"  ranks 1, 2: none\nrank 0 has 4, ranks 1, 2 have 3 parameters",
    ),
}


@on_ranks(3, timeout_s=TIMEOUT_S)
def test_other_modules_are_an_error(rank):
    """Tries all in one group, which then trains exactly."""
    errors = []
    for kind, (first, others, words) in MODULES.items():
        with pytest.raises(ValueError, match=f"(?s){words}") as caught:
            brigade.fully_shard(first() if rank == 0 else others())
        errors.append((kind, str(caught.value)))
    _expect_exact_steps(rank)
    expect_equal_on_ranks(errors)


# (blocks that rank 0 shards, blocks that rank 1 shards, regex of the error)
UNITS = [
    ([0], [1], r"parameter 2 differs.*rank 0: 'blocks\.1\.norm\.weight'"),
    ([0, 1], [0], r"rank 0: .* of unit 'Block'.*rank 1: .* of unit 'Net'"),
]


@pytest.mark.parametrize(("first", "second", "words"), UNITS)
@on_ranks(timeout_s=TIMEOUT_S)
def test_other_units_are_an_error(rank, first, second, words):
    model = make_net()
    with pytest.raises(ValueError, match=f"(?s){words}") as caught:
        for index in first if rank == 0 else second:
            brigade.fully_shard(model.blocks[index])
        brigade.fully_shard(model)
        model(batch_of(rank, 0))
    _expect_exact_steps(rank)
    expect_equal_on_ranks(str(caught.value))


# By argument: invalid value, type and regex of the rank's own error.
ARGUMENTS = {
    "prefetch_depth": (-1, ValueError, "prefetch_depth"),
    "mp_policy": (MixedPrecisionPolicy(param_dtype="bf16"), ValueError, "param_dtype"),
    "block_numel_fn": (lambda p: 0, ValueError, "block_numel_fn of 'weight'"),
    "reshard_after_forward": (7, ValueError, "reshard_after_forward"),
    "offload_policy": (CPUOffloadPolicy(), NotImplementedError, "offload_policy"),
    "comm_hook": (print, NotImplementedError, "comm.hook"),
}


@on_ranks(3, timeout_s=TIMEOUT_S)
def test_an_argument_of_one_rank_only_is_an_error(rank):
    for name, (value, error, words) in ARGUMENTS.items():
        arguments = {name: value} if rank == 1 else {}
        if rank != 1:
            error, words = (ValueError, RuntimeError), f"rank 1: {error.__name__}: .*{words}"
        with pytest.raises(error, match=words):
            brigade.fully_shard(nn.Linear(4, 4), **arguments)
        dist.barrier()
    layer = nn.Linear(4, 4)
    with pytest.raises(
        (ValueError, RuntimeError), match=None if rank == 1 else "rank 1: ValueError"
    ):
        brigade.fully_shard([layer, layer] if rank == 1 else layer)
    _expect_exact_steps(rank, 1)


# Arguments of all ranks with different values.
SETTINGS = {
    "prefetch_depth": (1, 2),
    "reshard_after_forward": (True, False),
    "mp_policy": (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "comm_hook": (None, "bf16_compress"),
    "block_numel_fn": (None, lambda p: 4),
    "broadcast_parameters": (True, False),
}


@on_ranks(timeout_s=TIMEOUT_S)
def test_other_settings_are_an_error(rank):
    errors = []
    for name, values in SETTINGS.items():
        with pytest.raises(
            ValueError, match=r"fully_shard: .* differs between ranks:\n  rank 0: "
        ) as caught:
            brigade.fully_shard(nn.Linear(4, 4), **{name: values[rank]})
        errors.append((name, str(caught.value)))
    _expect_exact_steps(rank, 1)
    expect_equal_on_ranks(errors)


@on_ranks(4, timeout_s=TIMEOUT_S)
def test_other_meshes_are_an_error(rank):
    rows = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    all_ranks = dist.device_mesh.DeviceMesh.from_group(dist.group.WORLD, "cpu")
    words = r"option num_shards differs between ranks:\n  rank 0: 2\n  ranks 1-3: 4\n"
    with pytest.raises(ValueError, match=words) as caught:
        brigade.fully_shard(nn.Linear(4, 4), mesh=rows if rank == 0 else all_ranks)
    _expect_exact_steps(rank, 1)
    expect_equal_on_ranks(str(caught.value))


@on_ranks()
def test_equal_units_in_another_order_are_an_error(rank):
    model = make_net()
    for index in ((0, 1, 2), (2, 1, 0))[rank]:
        brigade.fully_shard(model.blocks[index])
    brigade.fully_shard(model)
    with pytest.raises(ValueError, match=r"rank 0: 'blocks\.0'\n  rank 1: 'blocks\.2'"):
        model(batch_of(rank, 0))


@on_ranks(timeout_s=3, deadline_s=60)
def test_a_rank_with_fewer_steps_is_named_at_the_timeout(rank):
    store = dist.distributed_c10d._get_default_store()
    pair = Pair(rank)
    pair.expect_step(0)
    if rank == 1:
        store.wait(["is over"], datetime.timedelta(seconds=50))
    else:
        with pytest.raises(dist.DistBackendError, match=r"^fully_shard: (?s:.*)rank 1 did not"):
            pair.step(1)
        store.set("is over", "")
    dist.destroy_process_group()


@on_ranks(timeout_s=TIMEOUT_S)
def test_an_evaluation_of_one_rank_only_is_an_error(rank):
    pair = Pair(rank)
    pair.expect_step(0)
    words = r"(?s)rank 0 began .*, rank 1 began .*forwards under no_grad are collective"
    with pytest.raises(dist.DistBackendError, match=words):
        if rank == 1:
            with torch.no_grad():
                pair.loss(1)
        pair.step(1)
