"""All-gathers started by the program, with unshard() handles and with prefetch lists."""

import itertools

import pytest
from torch import nn

import brigade

from ranks import on_ranks
from sharded_training import is_unsharded
from whole_numbers import (
    backward_of_all,
    batch_of,
    expect_gradients,
    expect_parameters,
    layers,
    loss_of,
    num_bytes,
    step_by_sign,
)

SIZES = (3, 5, 2, 4, 2)  # units of even numel, so that no rank has padding
SENT = num_bytes(*SIZES)  # one all-gather of each unit


def _pair(**arguments):
    """Returns units '0' to '3' below a root without parameters of its own."""
    plain, model = layers(*SIZES), layers(*SIZES)
    for layer in model:
        brigade.fully_shard(layer, **arguments)
    return plain, brigade.fully_shard(model, **arguments)


def _step(rank, plain, model, step):
    backward_of_all(plain, 2, lambda net, r: loss_of(net, batch_of(SIZES[0], r, step)))
    loss_of(model, batch_of(SIZES[0], rank, step)).backward()
    expect_gradients(model, plain)
    step_by_sign(model, plain)


@pytest.mark.parametrize("reshards", [True, False])
@on_ranks()
def test_handles_in_a_training_loop_do_not_gather_twice(rank, reshards):
    plain, model = _pair(reshard_after_forward=reshards)
    model._set_unshard_async_op(True)
    for step in range(4):
        before = model.sharding_statistics()
        handles = [layer.unshard(async_op=True) for layer in model]
        for layer, handle in zip(model, handles, strict=True):
            handle.wait()
            assert is_unsharded(layer.weight)
        _step(rank, plain, model, step)
        assert not any(is_unsharded(layer.weight) for layer in model)
        after = model.sharding_statistics()
        # Each rank sends half of each unit, as often as without handles.
        sent = after["sent_by_gathers"] - before["sent_by_gathers"]
        assert sent == (1 + reshards) * SENT // 2
    model._set_unshard_async_op(False)
    _step(rank, plain, model, 4)
    expect_parameters(model, plain)


def _gathered(model):
    """Returns the units of the last step in launch order, in forward and in backward."""
    gathers = model.sharding_timeline().gathers
    return ["".join(g.unit for g in gathers if g.is_in_forward is which) for which in (True, False)]


def _num_ahead(model):
    """Counts the all-gathers of the last step that began before the previous unit was used."""
    return sum(
        following.launch_ns < gather.needed_ns
        for gather, following in itertools.pairwise(model.sharding_timeline().gathers)
        if gather.is_in_forward == following.is_in_forward
    )


# (lists in forward, lists in backward, all-gathers that they start ahead of use)
LISTS = [
    ({}, {}, 0),
    ({0: [1, 2], 1: [2, 3], 2: [3]}, {}, 3),
    ({0: [1], 2: [3]}, {2: [1]}, 3),
    ({1: [3, 2]}, {3: [1, 2], 1: [0]}, 5),
    ({0: [3, 1, 2]}, {}, 3),
]


@on_ranks()
def test_lists_set_how_far_ahead_units_are_gathered(rank):
    plain, model = _pair(prefetch_depth=0, reshard_after_forward=True)
    for step, (forward, backward, num_ahead) in enumerate(LISTS):
        for i, layer in enumerate(model):
            layer.set_modules_to_forward_prefetch([model[j] for j in forward.get(i, [])])
            layer.set_modules_to_backward_prefetch([model[j] for j in backward.get(i, [])])
        before = model.sharding_statistics()
        _step(rank, plain, model, step)
        after = model.sharding_statistics()
        assert _gathered(model) == ["0123", "3210"], step
        assert _num_ahead(model) == num_ahead, step
        assert after["sent_by_gathers"] - before["sent_by_gathers"] == SENT, step
        assert after["learned_segments"] <= 2
    expect_parameters(model, plain)


@on_ranks(1)
def test_modules_of_no_unit_or_of_another_model_are_errors(rank):
    _, model = _pair()
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        for wrong in ([nn.Linear(2, 2)], [model[0], brigade.fully_shard(nn.Linear(2, 2))]):
            with pytest.raises(ValueError, match="modules of the same outermost module"):
                getattr(model[0], name)(wrong)
