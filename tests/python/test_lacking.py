"""Unsupported methods and modules: an error on all ranks, after which training continues."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable import replicate
from torch.testing._internal.two_tensor import TwoTensor

import brigade

from ranks import on_ranks
from sharded_training import Pair, make_net
from whole_numbers import backward_of_all, batch_of, expect_gradients, layers, loss_of


def _lacking_methods():
    """Returns the methods that only raise, which are one function."""
    lacks = brigade.fully_shard.__globals__["_lacks"]
    methods = vars(brigade.FSDPModule).items()
    return {name for name, value in methods if getattr(value, "func", None) is lacks}


def test_fully_shard_takes_all_of_torchs_arguments():
    ours, theirs = (inspect.signature(s.fully_shard).parameters for s in (brigade, fsdp))
    assert set(theirs) <= set(ours)


@on_ranks()
def test_unsupported_methods_raise_with_any_arguments(rank):
    pair = Pair(rank)
    for name in sorted(_lacking_methods()):
        for arguments in ((), (None,)):
            with pytest.raises(NotImplementedError, match=rf"fully_shard lacks {name}\(\)"):
                getattr(pair.model.blocks[1], name)(*arguments)
    pair.expect_step(0)


@on_ranks()
def test_the_error_for_offloading_names_it(rank):
    model = make_net()
    before = dict(model.named_parameters())
    with pytest.raises(NotImplementedError, match="offload_policy"):
        brigade.fully_shard(model, offload_policy=fsdp.CPUOffloadPolicy())
    assert not isinstance(model, brigade.FSDPModule)
    assert dict(model.named_parameters()) == before
    Pair(rank, offload_policy=fsdp.OffloadPolicy()).expect_step(0)


# Unsupported calls of torch's programs, by regex of the error.
CALLS = {
    "deepcopy": (copy.deepcopy, "can't be copied"),
    "pickle": (lambda m: pickle.dumps(m.head.weight), "can't be pickled"),
    "move": (lambda m: m.to("meta"), "can't be moved"),
    "memory format": (
        lambda m: m.to(memory_format=torch.channels_last),
        "expected the memory format of",
    ),
    "functional": (
        lambda m: torch.func.grad(lambda x: m(x).sum())(torch.ones(4, 5)),
        r"grad",
    ),
}


@on_ranks()
def test_errors_name_the_unsupported_call_and_change_nothing(rank):
    """Makes all calls on one model, which then trains exactly."""
    pair = Pair(rank)
    for name, (call, words) in CALLS.items():
        module = brigade.fully_shard(nn.Conv2d(2, 2, 3)) if name == "memory format" else pair.model
        with pytest.raises(NotImplementedError, match=words):
            call(module)
    with pytest.raises(AssertionError, match="can't be copied"):
        copy.deepcopy(pair.model)
    pair.expect_step(0)


@on_ranks()
def test_a_module_with_shards_is_not_wrapped(rank):
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    brigade.fully_shard(net[1])
    with pytest.raises(RuntimeError, match=r"DDP around a sharded unit: '1\.weight'"):
        brigade.DistributedDataParallel(net)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(net[1])


@on_ranks()
def test_torchs_replicate_skips_units(rank):
    net = layers(4, 4, 4)
    model = replicate(layers(4, 4, 4))
    brigade.fully_shard(model[1])
    backward_of_all(net, 2, lambda each, r: loss_of(each, batch_of(4, r, 0)))
    loss_of(model, batch_of(4, rank, 0)).backward()
    assert torch.equal(model[0].weight.grad, net[0].weight.grad)
    expect_gradients(model[1], net[1])


# ---- Modules that would silently train to wrong values.


def _embedding():
    return nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 4))


def _bag():
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.EmbeddingBag(5, 4, max_norm=1.0)]))


def _hooked():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    net[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return net


class _GathersItself(nn.Parameter):
    def fsdp_pre_all_gather(self, *args):
        raise AssertionError("nobody calls it")


def _extended():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    net[1].weight = _GathersItself(net[1].weight.detach())
    return net


def _wrapping():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    halves = net[1].weight.detach(), net[1].weight.detach()
    net[1].weight = nn.Parameter(TwoTensor(*halves))
    return net


def _with_wide_gradients():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    net[1].weight.grad_dtype = torch.float32
    return net


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (_extended, NotImplementedError, r"parameter '1\.weight' of .* has fsdp_pre_all_gather"),
        (_wrapping, NotImplementedError, r"'1\.weight' of .* is a TwoTensor"),
        (_with_wide_gradients, NotImplementedError, r"'1\.weight' of .* has grad_dtype .*float32"),
        (_embedding, NotImplementedError, "Embedding '0' has max_norm"),
        (_bag, NotImplementedError, r"EmbeddingBag '1\.0' has max_norm"),
    ],
)
@on_ranks()
def test_the_same_error_on_all_ranks(rank, make, error, words):
    net = make() if rank == 0 else nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    if rank == 0:
        with pytest.raises(error, match=words):
            brigade.fully_shard(net)
    else:
        with pytest.raises(ValueError, match=f"rank 0: {error.__name__}: .*{words}"):
            brigade.fully_shard(net)
    net = brigade.fully_shard(nn.Sequential(nn.Linear(4, 4)))
    net(torch.ones(2, 4)).sum().backward()
    assert net[0].weight.grad is not None


@on_ranks()
def test_ignored_parameters_may_have_these_properties(rank):
    net = _embedding()
    brigade.fully_shard(net, ignored_params={net[0].weight})
    net(torch.tensor([1, 2])).sum().backward()
    net = _hooked()
    handle = net[1].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    handle.remove()
    brigade.fully_shard(net, ignored_params={net[1].weight})
