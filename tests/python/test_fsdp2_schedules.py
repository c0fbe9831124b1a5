"""Micro-batches whose forwards and backwards come in turn, as in stages of a pipeline."""

import pytest
import torch.distributed as dist

import brigade

from rank_cases import run_cases
from ranks import run_ranks
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

SIZES = (3, 5, 2, 4)  # of units of even numel: no rank of 2 has padding
SENT = num_bytes(*SIZES)  # of all units, once
NUM_BATCHES = 4


def one_forward_one_backward(num_ahead):
    """Each forward and backward, by micro-batch; so many forwards are ahead of backwards."""
    passes = [("forward", batch) for batch in range(num_ahead)]
    for batch in range(NUM_BATCHES):
        passes.append(("backward", batch))
        if batch + num_ahead < NUM_BATCHES:
            passes.append(("forward", batch + num_ahead))
    return passes


SCHEDULES = {
    "1 ahead": one_forward_one_backward(1),
    "2 ahead": one_forward_one_backward(2),
    "3 ahead": one_forward_one_backward(3),
    "all ahead": one_forward_one_backward(NUM_BATCHES),
    "all ahead, and back": [("forward", i) for i in range(NUM_BATCHES)]
    + [("backward", i) for i in reversed(range(NUM_BATCHES))],
}


def _each_is_reduced(model, is_last):
    model.set_is_last_backward(is_last)


def _last_is_reduced(model, is_last):
    model.set_is_last_backward(is_last)
    model.set_requires_gradient_sync(is_last)


def _stays_whole(model, is_last):
    _last_is_reduced(model, is_last)
    model.set_reshard_after_backward(is_last)


def _rows_add_up(model, is_last):
    model.set_is_last_backward(is_last)
    model.set_requires_all_reduce(is_last)


SETTINGS = {
    "each is reduced": _each_is_reduced,
    "last is reduced": _last_is_reduced,
    "stays whole": _stays_whole,
    "rows add up": _rows_add_up,
}


def _pair(**arguments):
    plain, model = layers(*SIZES), layers(*SIZES)
    for layer in model:
        brigade.fully_shard(layer, **arguments)
    return plain, brigade.fully_shard(model, **arguments)


def _batch(rank, step, batch):
    return batch_of(SIZES[0], rank, NUM_BATCHES * step + batch)


def _run(rank, model, step, schedule, set_up):
    """`set_up`: called before each backward, with whether it is the last of the step."""
    losses, num_backwards = {}, 0
    for kind, batch in schedule:
        if kind == "forward":
            losses[batch] = loss_of(model, _batch(rank, step, batch))
        else:
            num_backwards += 1
            set_up(model, num_backwards == NUM_BATCHES)
            losses.pop(batch).backward()


def _backward_of_all_batches(plain, step, world_size):
    for batch in range(NUM_BATCHES):
        backward_of_all(plain, world_size, lambda net, r, b=batch: loss_of(net, _batch(r, step, b)))


def _trains(rank, schedule, set_up, reshards, mesh=None):
    world_size = dist.get_world_size()
    if mesh is not None:
        mesh = dist.init_device_mesh("cpu", mesh)
    plain, model = _pair(reshard_after_forward=reshards, mesh=mesh)
    for step in range(2):
        _run(rank, model, step, SCHEDULES[schedule], SETTINGS[set_up])
        _backward_of_all_batches(plain, step, world_size)
        expect_gradients(model, plain)
        step_by_sign(model, plain)
    expect_parameters(model, plain)
    is_once = set_up in ("last is reduced", "stays whole")
    assert model.sharding_statistics()["reduced_backwards"] == (2 if is_once else 2 * NUM_BATCHES)


@pytest.mark.parametrize("set_up", SETTINGS)
def test_gradients_are_those_of_all_micro_batches(set_up):
    run_cases(_trains, [(name, set_up, r) for name in SCHEDULES for r in (True, False)])


def test_parts_on_neighbours_are_right_for_any_backward():
    run_cases(_trains, [("2 ahead", set_up, 2) for set_up in SETTINGS], world_size=4)


def test_rows_that_are_copies_of_each_other():
    run_cases(_trains, [("2 ahead", set_up, True, (2, 2)) for set_up in SETTINGS], world_size=4)


def _set_before_forwards(rank):
    """As torch's schedules do: what is set before the last forward counts for its backward."""
    plain, model = _pair()
    for step in range(2):
        losses = []
        for batch in range(NUM_BATCHES):
            model.set_requires_gradient_sync(batch == NUM_BATCHES - 1)
            model.set_is_last_backward(batch == NUM_BATCHES - 1)
            losses.append(loss_of(model, _batch(rank, step, batch)))
            if batch > 0:
                losses.pop(0).backward()
        losses.pop(0).backward()
        _backward_of_all_batches(plain, step, 2)
        expect_gradients(model, plain)
        step_by_sign(model, plain)
    assert model.sharding_statistics()["reduced_backwards"] == 2 * 2  # that before the last, too


def test_settings_before_forwards():
    run_ranks(_set_before_forwards)


def _gathers_once(rank, by_hand):
    """A stage of a pipeline that has room for all parameters sends them once in a step."""
    plain, model = _pair(reshard_after_forward=False)
    for step in range(2):
        before = model.sharding_statistics()
        model.set_reshard_after_backward(False)
        if by_hand:
            for layer in model:
                layer.unshard()
            gathered = model.sharding_statistics()["sent_by_gathers"]
            assert gathered - before["sent_by_gathers"] == SENT // 2
        _run(rank, model, step, SCHEDULES["2 ahead"], _last_is_reduced)
        after = model.sharding_statistics()
        assert after["sent_by_gathers"] - before["sent_by_gathers"] == SENT // 2
        assert after["sent_by_sums"] - before["sent_by_sums"] == SENT // 2
        for layer in model:
            layer.reshard()
            assert isinstance(layer.weight, brigade.ShardedParameter)
        _backward_of_all_batches(plain, step, 2)
        expect_gradients(model, plain)
        step_by_sign(model, plain)
    expect_parameters(model, plain)


def test_what_stays_whole_is_gathered_once_in_a_step():
    run_cases(_gathers_once, [(True,), (False,)])


def _sent_by_gathers(model):
    return model.sharding_statistics()["sent_by_gathers"]


def _resharded_between(rank):
    """Units are sharded by hand between a forward and its backward, and whole again for it."""
    plain, model = _pair(reshard_after_forward=False)
    for step in range(2):
        losses, sent = [], [_sent_by_gathers(model)]
        for batch in range(NUM_BATCHES):
            losses.append(loss_of(model, _batch(rank, step, batch)))
            model[batch % 3].reshard()
        sent.append(_sent_by_gathers(model))
        for batch, loss in enumerate(losses):
            model.set_requires_gradient_sync(batch == NUM_BATCHES - 1)
            if batch == 1:
                model[2].unshard()
            loss.backward()
            model[batch % 3].reshard()
        sent.append(_sent_by_gathers(model))
        # All once, and each once more; then the first unit, and all for the other backwards.
        assert sent[1] - sent[0] == SENT
        assert sent[2] - sent[1] == (num_bytes(*SIZES[:2]) + 3 * SENT) // 2
        _backward_of_all_batches(plain, step, 2)
        expect_gradients(model, plain)
        step_by_sign(model, plain)
    expect_parameters(model, plain)


def test_units_may_be_sharded_by_hand_between_forward_and_backward():
    run_ranks(_resharded_between)


def _stages(rank):
    """Two models in one process, one's outputs the other's inputs, each an outermost one."""
    sizes = (SIZES[0], 4, 2, 3, 2)
    plain, model = layers(*sizes), layers(*sizes)
    stages = [model[:2], model[2:]]
    for stage in stages:
        brigade.fully_shard(stage[1])
        brigade.fully_shard(stage)
    for step in range(2):
        activations = {}
        for kind, batch in one_forward_one_backward(2):
            if kind == "forward":
                first = stages[0](_batch(rank, step, batch))
                received = first.detach().requires_grad_()
                activations[batch] = first, received, loss_of(stages[1], received)
                continue
            for stage in stages:
                stage.set_requires_gradient_sync(batch == NUM_BATCHES - 1)
            first, received, loss = activations.pop(batch)
            loss.backward()
            first.backward(received.grad)
        _backward_of_all_batches(plain, step, 2)
        expect_gradients(model, plain)
        step_by_sign(model, plain)
    expect_parameters(model, plain)


def test_two_stages_in_one_process():
    run_ranks(_stages)
