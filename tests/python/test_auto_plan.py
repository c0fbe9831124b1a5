"""bucket_plan="auto": buckets planned while training; 2 ranks keep torch's bits."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import brigade

from cases import pairwise
from ranks import on_ranks
from sharded_training import expect_equal_on_ranks
from training import CLASSES, assert_equal, inputs, loss_of


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*itertools.chain(*((nn.Linear(6, 6), nn.Tanh()) for _ in range(9))))


@pairwise(
    static_graph=[False, True],
    views=[False, True],
    find_unused=[False, True],
    accumulates=[False, True],
)
@on_ranks()
def test_training_keeps_torchs_bits(rank, static_graph, views, find_unused, accumulates):
    options = {
        "static_graph": static_graph,
        "gradient_as_bucket_view": views,
        "find_unused_parameters": find_unused,
    }
    results, plans = {}, []
    for name, wrapper in CLASSES.items():
        own = {"bucket_plan": "auto", "bucket_cap_mb": 1e-5} if name == "brigade" else {}
        model = wrapper(_model(), **options, **own)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step, x in enumerate(inputs(rank, 16)):
            optimizer.zero_grad()
            if accumulates and step % 3 == 1:
                with model.no_sync():
                    loss_of(model(x)).backward()
            loss_of(model(x)).backward()
            optimizer.step()
        results[name] = [p.detach() for p in model.parameters()]
        if name == "brigade":
            plans.append(model.bucket_plan())
    assert_equal(results["brigade"], results["torch"])
    expect_equal_on_ranks(plans[0])
    resumed = brigade.DistributedDataParallel(_model(), bucket_plan=plans[0])
    assert resumed.bucket_plan() == plans[0]


@pytest.mark.parametrize("failing", [2, 4, 7, 10])
@on_ranks()
def test_a_rank_that_cannot_deliver_takes_part_in_the_plan(rank, failing):
    """The plan's collectives follow these iterations, on the rank that failed too."""
    model = _model()
    wrapped = brigade.DistributedDataParallel(model, bucket_plan="auto", bucket_cap_mb=1e-5)
    step = 0

    def spoil(parameter):
        if rank == 0 and step == failing:
            with torch.inference_mode():
                parameter.grad = torch.zeros_like(parameter)

    model[6].weight.register_post_accumulate_grad_hook(spoil)
    for step, x in enumerate(inputs(rank, 12), 1):
        wrapped.zero_grad()
        loss = loss_of(wrapped(x))
        if rank == 0 and step == failing:
            with pytest.raises(RuntimeError, match=r"[Ii]nference"):
                loss.backward()
        else:
            loss.backward()
    expect_equal_on_ranks(wrapped.bucket_plan())


@pytest.mark.parametrize("longest", [0, 1])
@on_ranks()
def test_ranks_may_have_different_numbers_of_batches(rank, longest):
    model = brigade.DistributedDataParallel(_model(), bucket_plan="auto", bucket_cap_mb=1e-5)
    with model.join():
        for x in inputs(rank, 16 if rank == longest else 5):
            model.zero_grad()
            loss_of(model(x)).backward()
    expect_equal_on_ranks(model.bucket_plan())


@on_ranks()
def test_ranks_that_disagree_get_an_error(rank):
    plans = ({"bucket_plan": "auto"}, {})
    with pytest.raises(RuntimeError, match=r"(?s)option bucket_plan differs.*rank 0: auto"):
        brigade.DistributedDataParallel(_model(), **plans[rank])


@on_ranks()
def test_optimizer_steps_in_backward_are_refused(rank):
    net = _model()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    model = brigade.DistributedDataParallel(net, bucket_plan="auto")
    with pytest.raises(RuntimeError, match='bucket_plan="auto"'):
        model(inputs(rank, 1)[0])


@on_ranks()
def test_one_rank_may_copy_the_model(rank):
    model = brigade.DistributedDataParallel(_model(), bucket_plan="auto")
    if rank == 1:
        copy.deepcopy(model)
    for x in inputs(rank, 14):
        model.zero_grad()
        loss_of(model(x)).backward()
    expect_equal_on_ranks(model.bucket_plan())
