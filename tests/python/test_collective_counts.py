"""Numbers of all-gathers and reduce-scatters in micro-batches, by the units' settings."""

import collections
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

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

NUM_BATCHES = 3
SIZES = (3, 8, 4, 8)
UNITS = ["", "0", "1"]

# Settings before each micro-batch, given whether it is the last.
KINDS = {
    "each": lambda model, is_last: None,
    "sum": lambda model, is_last: model.set_requires_gradient_sync(is_last),
    "sum whole": lambda model, is_last: (
        model.set_requires_gradient_sync(is_last),
        model.set_reshard_after_backward(is_last),
    ),
    "rows": lambda model, is_last: model.set_requires_all_reduce(is_last),
    "rows whole": lambda model, is_last: (
        model.set_requires_all_reduce(is_last),
        model.set_reshard_after_backward(is_last),
    ),
}


def _pair(mesh_shape, reshards):
    model = layers(*SIZES)
    mesh = dist.init_device_mesh("cpu", mesh_shape)
    for layer in model[:2]:
        brigade.fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    return layers(*SIZES), brigade.fully_shard(model, mesh=mesh)


def _expected_gathers(kind, reshards, batch):
    """Returns the number of all-gathers by (unit, is forward)."""
    if batch > 0 and kind.endswith("whole"):  # unsharded since the first backward
        return collections.Counter()
    in_backward = ["1", "0"] if reshards else []
    return collections.Counter(
        [(unit, True) for unit in UNITS] + [(unit, False) for unit in in_backward]
    )


@pytest.mark.parametrize(
    ("kind", "mesh_shape", "reshards"),
    [
        *itertools.product(["each", "sum", "sum whole"], [(4,)], [True, False, 2]),
        *itertools.product(KINDS, [(2, 2)], [True, False]),
    ],
)
@on_ranks(4)
def test_of_micro_batches(rank, kind, mesh_shape, reshards):
    plain, model = _pair(mesh_shape, reshards)
    learned = []
    for step in range(2):
        of_timeline = collections.Counter()  # of backwards since the last reduction
        for batch in range(NUM_BATCHES):
            is_last = batch == NUM_BATCHES - 1
            KINDS[kind](model, is_last)
            model.set_is_last_backward(is_last)

            def loss_on(net, r, number=NUM_BATCHES * step + batch):
                return loss_of(net, batch_of(SIZES[0], r, number))

            before = model.sharding_statistics()
            loss_on(model, rank).backward()
            after = model.sharding_statistics()
            backward_of_all(plain, 4, loss_on)

            gathers = _expected_gathers(kind, reshards, batch)
            of_timeline += gathers
            is_reduced = is_last or not kind.startswith("sum")
            assert after["all_gathers"] - before["all_gathers"] == gathers.total(), (step, batch)
            assert after["reductions"] - before["reductions"] == len(UNITS) * is_reduced
            if is_reduced:
                timeline = model.sharding_timeline()
                counted = collections.Counter((g.unit, g.is_in_forward) for g in timeline.gathers)
                assert counted == of_timeline, (step, batch)
                assert sorted(r.unit for r in timeline.reductions) == UNITS
                of_timeline.clear()
        expect_gradients(model, plain)
        step_by_sign(model, plain)
        learned.append(after["learned_segments"])
    assert learned[0] == learned[1]


# ---- Micro-batches whose forwards and backwards alternate, as in pipeline stages.


def _batch(rank, step, batch):
    return batch_of(SIZES[0], rank, NUM_BATCHES * step + batch)


def _expect_step(model, plain, step):
    for batch in range(NUM_BATCHES):
        backward_of_all(plain, 2, lambda net, r, b=batch: loss_of(net, _batch(r, step, b)))
    expect_gradients(model, plain)
    step_by_sign(model, plain)
    expect_parameters(model, plain)


@on_ranks()
def test_two_stages_in_one_process(rank):
    plain, model = layers(*SIZES, 2), layers(*SIZES, 2)
    stages = [model[:2], model[2:]]
    for stage in stages:
        brigade.fully_shard(stage[1])
        brigade.fully_shard(stage)
    for step in range(2):
        activations = []
        for batch in range(NUM_BATCHES + 2):
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


@pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "GradientReductionHandle"),
    reason="this torch's schedules have no defer_reduce_grad_wait",
)
@on_ranks(4)
def test_a_pipeline_schedule_may_defer_waits_for_reductions(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    stages, shards = mesh["stages"], mesh["shards"]
    plain, model = layers(5, 4, 4, 3, 2), layers(5, 4, 4, 3, 2)
    own = [stages.get_local_rank(), stages.get_local_rank() + 2]
    schedule = ScheduleInterleaved1F1B(
        [
            PipelineStage(
                brigade.fully_shard(model[i], mesh=shards),
                i,
                len(model),
                torch.device("cpu"),
                group=stages.get_group(),
            )
            for i in own
        ],
        n_microbatches=4,
        loss_fn=lambda output, _: output.square().sum(),
        defer_reduce_grad_wait=True,
    )
    batch = torch.cat([batch_of(5, shards.get_local_rank(), step) for step in range(4)])
    schedule.step(*([batch] if 0 in own else []), target=batch)
    for step in range(4):
        backward_of_all(plain, 2, lambda net, r, s=step: loss_of(net, batch_of(5, r, s)) / 4)
    for i in own:
        expect_gradients(model[i], plain[i])
