"""Activation checkpoints inside a unit's forward, compared bit for bit with none."""

import functools

import pytest
import torch
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import brigade

from ranks import on_ranks
from sharded_training import Block, Pair, make_net, replicated, shard_blocks


def _checkpoint(use_reentrant):
    return functools.partial(checkpoint, use_reentrant=use_reentrant)


class _SomeOfIt(Block):
    """A checkpointed region whose parameters are also used outside it."""

    def forward(self, x):
        y = self.again(lambda h: self.down(torch.tanh(self.up(self.norm(h)))), x)
        return x + y * self.up.bias.mean() + self.norm(x)


class _Nested(Block):
    def forward(self, x):
        def inner(h):
            return torch.tanh(self.up(self.norm(h)))

        def outer(h):
            return self.down(checkpoint(inner, h, use_reentrant=self.inner_is_reentrant)) + h

        return self.again(outer, x)


class _Plain(_SomeOfIt):
    again = staticmethod(lambda function, *args: function(*args))


def _selective(function, *args):
    contexts = functools.partial(
        create_selective_checkpoint_contexts,
        [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
    )
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


class _AroundCall(Block):
    """Checkpoints __call__(), and so the module's hooks, as transformers' layers do."""

    def __call__(self, x):
        return self.again(super().__call__, x)


def _with_blocks(cls, use_reentrant):
    net = make_net()
    for block in net.blocks:
        block.__class__ = cls
        block.again = _checkpoint(use_reentrant)
    return net


def _selectively(use_reentrant, cls):
    net = _with_blocks(cls, use_reentrant)
    for block in net.blocks:
        block.again = _selective
    return net


def _nested(use_reentrant, inner_is_reentrant):
    net = _with_blocks(_Nested, use_reentrant)
    for block in net.blocks:
        block.inner_is_reentrant = inner_is_reentrant
    return net


def _composed(use_reentrant):
    net = make_net()
    for block in net.blocks:
        composable_checkpoint(block)
    return net


def _wrapped(use_reentrant):
    net = make_net()
    for index, block in enumerate(net.blocks):
        net.blocks[index] = checkpoint_wrapper(block)
    return net


def _trains(rank, make, use_reentrant, shard):
    net = make(use_reentrant)
    plain = make_net()
    if make in (_SOME, _SELECTIVE):
        for block in plain.blocks:
            block.__class__ = _Plain
    pair = Pair(rank, nets=(plain, shard(net)))
    for step in range(3):
        pair.step(step)
    for value, parameter in zip(net.full_state_dict().values(), plain.parameters(), strict=True):
        assert torch.equal(value, parameter)


_SOME = functools.partial(_with_blocks, _SomeOfIt)
_SELECTIVE = functools.partial(_selectively, cls=_SomeOfIt)
_AROUND = functools.partial(_with_blocks, _AroundCall)
_KINDS = {
    "some": _SOME,
    "around": _AROUND,
    "wrapper": _wrapped,
    "composed": _composed,
    "selective": _SELECTIVE,
    "selective around": functools.partial(_selectively, cls=_AroundCall),
    "around another": functools.partial(_nested, inner_is_reentrant=False),
    "around a reentrant one": functools.partial(_nested, inner_is_reentrant=True),
}


def _one_unit(net):
    return brigade.fully_shard(net)


def _kept(net):
    return shard_blocks(net, reshard_after_forward=False)


def _replicated(net):
    return shard_blocks(net, replicated)


_SHARDS = {"blocks": shard_blocks, "one unit": _one_unit, "kept": _kept, "replicas": _replicated}


_MODES = [(name, again) for name in _KINDS for again in (False, True)]


@pytest.mark.parametrize(("name", "use_reentrant"), _MODES)
@on_ranks()
def test_checkpoints_change_no_bits(rank, name, use_reentrant):
    for shard in _SHARDS.values():
        _trains(rank, _KINDS[name], use_reentrant, shard)
