"""Copies and pickles of a wrapper, made on one rank, train with the other ranks."""

import copy
import io

import pytest
import torch
import torch.distributed as dist

import brigade

from ranks import on_ranks
from training import Perceptron, assert_equal, inputs, train


def _pickled(wrapped):
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [copy.deepcopy, _pickled])
@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"find_unused_parameters": True, "check_module": "off"}],
    ids=["default", "static_graph", "find_unused"],
)
@on_ranks(timeout_s=30)
def test_one_rank_may_copy_its_wrapper_alone(rank, make, options):
    torch.manual_seed(0)
    wrapped = brigade.DistributedDataParallel(Perceptron(), **options)
    expected = train(copy.deepcopy(wrapped), inputs(rank, 3))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        again = make(wrapped)
        store.set("copied", "")
    else:
        store.wait(["copied"])  # rank 0 waits for no collective of this rank
        again = make(wrapped)
    del wrapped
    assert type(again) is brigade.DistributedDataParallel
    assert_equal(train(again, inputs(rank, 3)), expected)
    assert again.check_module == options.get("check_module", "error")
    assert again.static_graph == options.get("static_graph", False)
