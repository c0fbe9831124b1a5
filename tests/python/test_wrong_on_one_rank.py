"""Constructor arguments that are invalid, or differ from the peers', on one rank."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks

TIMEOUT_S = 20


def _wrapped(module=None, **options):
    return brigade.DistributedDataParallel(module or nn.Linear(2, 2), **options)


_DELAYED, _HOOKED = "delay_all_reduce_named_params", "param_to_hook_all_reduce"
_PRECISION = torch.nn.parallel.distributed._MixedPrecision()
# By regex of the error: its type, and the constructor's arguments.
WRONG_ALONE = {
    "bucket_cap_mb": (ValueError, {"bucket_cap_mb": -1}),
    "bucket_cap_mb_list": (TypeError, {"bucket_cap_mb_list": ["a"]}),
    "check_module": (ValueError, {"check_module": "x"}),
    "bucket_plan must be a list of lists": (TypeError, {"bucket_plan": [["a"]]}),
    "bucket_plan must be a list of lists .*, got 3": (TypeError, {"bucket_plan": 3}),
    "bucket_plan must .*, got -1": (ValueError, {"bucket_plan": [[0, -1]]}),
    f"{_HOOKED} is missing": (ValueError, {_DELAYED: []}),
    f"{_HOOKED} must be a torch.Tensor": (TypeError, {_DELAYED: [], _HOOKED: "weight"}),
    f"{_HOOKED} must require a grad": (ValueError, {_DELAYED: [], _HOOKED: torch.ones(2)}),
    "device_ids": (ValueError, {"device_ids": [0]}),
    "module must be": (TypeError, {"module": 3}),
    "nothing to reduce": (RuntimeError, {"module": nn.ReLU()}),
    "DistributedDataParallel: find_unused_parameters": (
        RuntimeError,
        {"mixed_precision": _PRECISION, "find_unused_parameters": True},
    ),
}


@on_ranks(3, timeout_s=TIMEOUT_S)
def test_an_invalid_argument_of_one_rank_is_an_error_on_all(rank):
    for words, (error, options) in WRONG_ALONE.items():
        if rank == 1:
            with pytest.raises(error, match=words):
                brigade.DistributedDataParallel(**{"module": nn.Linear(2, 2), **options})
        else:
            with pytest.raises(RuntimeError, match=rf"rank 1: {error.__name__}: .*{words}"):
                _wrapped()
    _wrapped()(torch.ones(1, 2)).sum().backward()


NAMES = ("1.weight", "1.bias", "0.weight", "0.bias")


def _all_delayed(order, buffer_size=1, **options):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.register_buffer("mask", torch.ones(buffer_size))
    named = dict(net.named_parameters())
    wrapped = _wrapped(
        net,
        delay_all_reduce_named_params=[(name, named[name]) for name in order],
        param_to_hook_all_reduce=named[order[-1]],
        **options,
    )
    assert wrapped._delay_all_reduce_all_params
    return wrapped


@on_ranks(timeout_s=TIMEOUT_S)
def test_ranks_that_delay_everything_raise_for_a_peers_invalid_argument(rank):
    with pytest.raises((ValueError, RuntimeError), match="bucket_cap_mb"):
        _all_delayed(NAMES, bucket_cap_mb=-1 if rank == 1 else 25)


@on_ranks(timeout_s=TIMEOUT_S)
def test_delayed_parameters_in_another_order_are_an_error_on_all(rank):
    # No rank broadcasts buffers.
    _all_delayed(NAMES, buffer_size=rank + 1)(torch.ones(1, 2)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"delayed parameter 0 differs .*\n.*1.weight.*\n.*1.bias"
    ):
        _all_delayed([NAMES[rank], NAMES[1 - rank], *NAMES[2:]])


@on_ranks(timeout_s=TIMEOUT_S)
def test_an_invalid_argument_raises_at_once_if_peers_are_late(rank):
    store = dist.distributed_c10d._get_default_store()

    class Stderr(io.StringIO):
        def write(self, text):
            if text.strip():
                store.set("said", text)
            return len(text)

    if rank == 0:
        store.wait(["said"])
        with pytest.raises(RuntimeError, match="rank 1: ValueError"):
            _wrapped()
        return
    brigade._checks._LATE_S = 0.0
    with contextlib.redirect_stderr(Stderr()), pytest.raises(ValueError, match="bucket_cap_mb"):
        _wrapped(bucket_cap_mb=-1)
    assert b"waiting to send an error to the other ranks: ValueError: " in store.get("said")
