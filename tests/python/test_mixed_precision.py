"""torch's native mixed precision, which replaces parameters by low-precision copies."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.nn.parallel.distributed import _MixedPrecision

import brigade

from cases import pairwise
from ranks import on_ranks
from training import CLASSES, Perceptron, assert_equal, inputs, loss_of


class _NoStream(nullcontext):
    """The CPU has no streams, but the inherited casts ask for some."""

    def wait_stream(self, other) -> None: ...
    def record(self) -> None: ...
    def wait(self, stream) -> None: ...


def _streams_on_the_cpu():
    return mock.patch.multiple(torch, Stream=_NoStream, Event=_NoStream), mock.patch.object(
        torch.accelerator, "current_stream", _NoStream
    )


@pairwise(
    views=[False, True],
    set_to_none=[True, False],
    reduce_dtype=[torch.bfloat16, torch.float32],
)
@on_ranks()
def test_training_in_low_precision_gives_torchs_bits(rank, views, set_to_none, reduce_dtype):
    precision = _MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, buffer_dtype=torch.bfloat16
    )
    streams, current = _streams_on_the_cpu()
    first, *others = inputs(rank, 4)
    gradients = {}
    with streams, current:
        for name, wrapper in CLASSES.items():
            torch.manual_seed(0)
            # On the CPU, torch's gradient views keep the values of one iteration.
            views_here = views and name == "brigade"
            wrapped = wrapper(
                Perceptron(), mixed_precision=precision, gradient_as_bucket_view=views_here
            )
            gradients[name] = []
            for x in (first, first, *others):
                wrapped.zero_grad(set_to_none=set_to_none)
                loss_of(wrapped(x)).backward()
                for parameter in wrapped.parameters():
                    assert parameter.dtype == parameter.grad.dtype == torch.float32
                gradients[name].append([p.grad.clone() for p in wrapped.parameters()])
    # torch's first iteration returns uninitialized gradients.
    assert_equal(gradients["brigade"][0], gradients["torch"][1])
    for ours, torchs in zip(gradients["brigade"][1:], gradients["torch"][1:], strict=True):
        assert_equal(ours, torchs)


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@on_ranks()
def test_the_wrapper_evaluates_batch_norm_and_trains_on(rank, without_gradients):
    precision = _MixedPrecision(torch.bfloat16, torch.bfloat16, buffer_dtype=torch.bfloat16)
    streams, current = _streams_on_the_cpu()
    found = []
    with streams, current:
        for evaluates in (False, True):
            torch.manual_seed(0)
            wrapped = brigade.DistributedDataParallel(Perceptron(), mixed_precision=precision)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            for x in inputs(rank, 3):
                loss = loss_of(wrapped(x))
                if evaluates:  # between forward and backward
                    _evaluate(wrapped.eval(), without_gradients)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if evaluates:
                    before = [p.clone() for p in wrapped.parameters()]
                    output = _evaluate(wrapped, without_gradients)
                    assert output.dtype == torch.bfloat16
                    assert_equal(list(wrapped.parameters()), before)
                wrapped.train()
            found.append(list(wrapped.parameters()))
    assert_equal(*found)


def _evaluate(wrapped, without_gradients):
    with without_gradients():
        return wrapped(torch.ones(4, 6))
