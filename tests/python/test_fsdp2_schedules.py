"""Micro-batches whose forwards and backwards come in turn, as in stages of a pipeline."""

import brigade

from ranks import on_ranks
from whole_numbers import (
    backward_of_all,
    batch_of,
    expect_gradients,
    expect_parameters,
    layers,
    loss_of,
    step_by_sign,
)

SIZES = (3, 4, 2, 3, 2)
NUM_BATCHES = 4


def _batch(rank, step, batch):
    return batch_of(SIZES[0], rank, NUM_BATCHES * step + batch)


def _expect_step(model, plain, step):
    for batch in range(NUM_BATCHES):
        backward_of_all(plain, 2, lambda net, r, b=batch: loss_of(net, _batch(r, step, b)))
    expect_gradients(model, plain)
    step_by_sign(model, plain)
    expect_parameters(model, plain)


@on_ranks()
def test_settings_before_forwards(rank):
    """As torch's schedules do: what is set before the last forward counts for its backward."""
    plain, model = layers(*SIZES), layers(*SIZES)
    for layer in model:
        brigade.fully_shard(layer)
    brigade.fully_shard(model)
    for step in range(2):
        losses = []
        for batch in range(NUM_BATCHES):
            model.set_requires_gradient_sync(batch == NUM_BATCHES - 1)
            model.set_is_last_backward(batch == NUM_BATCHES - 1)
            losses.append(loss_of(model, _batch(rank, step, batch)))
            if batch > 0:
                losses.pop(0).backward()
        losses.pop(0).backward()
        _expect_step(model, plain, step)
    assert model.sharding_statistics()["reduced_backwards"] == 2 * 2  # that before the last, too


@on_ranks()
def test_two_stages_in_one_process(rank):
    """Two models in one process, one's outputs the other's inputs, each an outermost one."""
    plain, model = layers(*SIZES), layers(*SIZES)
    stages = [model[:2], model[2:]]
    for stage in stages:
        brigade.fully_shard(stage[1])
        brigade.fully_shard(stage)
    for step in range(2):
        activations = []
        for batch in range(NUM_BATCHES + 2):  # two forwards are ahead
            if batch < NUM_BATCHES:
                first = stages[0](_batch(rank, step, batch))
                received = first.detach().requires_grad_()
                activations.append((first, received, loss_of(stages[1], received)))
            if batch < 2:
                continue
            for stage in stages:
                stage.set_requires_gradient_sync(batch == NUM_BATCHES + 1)
            first, received, loss = activations.pop(0)
            loss.backward()
            first.backward(received.grad)
        _expect_step(model, plain, step)
