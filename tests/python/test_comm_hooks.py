"""torch's comm hooks work unchanged, and hooks that fail do so in an orderly way."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

import brigade

from ranks import on_ranks
from training import Perceptron, assert_same_bits, both, inputs, loss_of, train


def no_state():
    return None


def power_sgd():
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def post_local_sgd():
    alone, _ = dist.new_subgroups(group_size=1)
    return post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=3)


def chained(state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(2)).then(lambda done: done.value() * 3)


class CallableHook:
    def __init__(self) -> None:
        self.__name__ = self.__qualname__ = "CallableHook"  # torch wants them

    def __call__(
        self, state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.allreduce_hook(None, bucket)


HOOKS = {
    "power_sgd": (power_sgd, powerSGD_hook.powerSGD_hook),
    "fp16_around_power_sgd": (
        power_sgd,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "post_local_sgd": (post_local_sgd, post_localSGD_hook.post_localSGD_hook),
    "chained": (no_state, chained),
    "callable": (no_state, CallableHook()),
}


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", HOOKS)
@on_ranks()
def test_a_hook_of_torch_gives_the_same_bits(rank, name, views):
    make_state, hook = HOOKS[name]
    assert_same_bits(
        both(
            Perceptron,
            inputs(rank, 5),
            lambda wrapped: wrapped.register_comm_hook(make_state(), hook),
            gradient_as_bucket_view=views,
        )
    )


@pytest.mark.parametrize(
    "kind", [dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS]
)
@on_ranks()
def test_built_in_hooks_average(rank, kind):
    results = both(
        Perceptron,
        inputs(rank, 3),
        lambda wrapped: wrapped._register_builtin_comm_hook(kind),
    )
    if kind == dist.BuiltinCommHookType.ALLREDUCE:
        assert_same_bits(results)
    for ours, theirs in zip(results["brigade"], results["torch"], strict=True):
        # We divide before the cast, which rounds differently.
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


@on_ranks()
def test_a_hook_sees_raw_gradients_and_the_callers_state(rank):
    seen = []

    def look(state, bucket: dist.GradBucket):
        state.append(
            (
                bucket.index(),
                bucket.is_last(),
                bucket.buffer().clone(),
                [g.shape for g in bucket.gradients()],
                [p.shape for p in bucket.parameters()],
            )
        )
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    torch.manual_seed(0)
    wrapped = brigade.DistributedDataParallel(nn.Linear(2, 1))
    wrapped.register_comm_hook(seen, look)
    wrapped(torch.full((1, 2), float(rank + 1))).sum().backward()
    ((index, is_last, buffer, gradients, parameters),) = seen
    assert (index, is_last) == (0, True)
    assert sorted(buffer.tolist()) == sorted([rank + 1.0, rank + 1.0, 1.0])
    assert gradients == parameters and {tuple(s) for s in gradients} == {(1, 2), (1,)}


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, KeyError, Exception])
@on_ranks()
def test_what_a_hook_raises_comes_out_of_backward_and_training_goes_on(rank, kind):
    class Mine(kind):
        pass

    fail = [Mine(f"from rank {rank}")]

    def hook(state, bucket):
        if fail[0]:
            raise fail[0]
        return default_hooks.allreduce_hook(None, bucket)

    torch.manual_seed(0)
    wrapped = brigade.DistributedDataParallel(Perceptron())
    wrapped.register_comm_hook(None, hook)
    batches = inputs(rank, 3)
    with pytest.raises(Mine) as error:
        loss_of(wrapped(batches[0])).backward()
    assert error.value is fail[0]
    fail[0] = None
    wrapped.zero_grad()
    ours = train(wrapped, batches[1:])
    assert not any(t.isnan().any() for t in ours)


@on_ranks(1)
def test_a_hook_that_returns_no_future_is_an_error(rank):
    wrapped = brigade.DistributedDataParallel(nn.Linear(2, 1))
    wrapped.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(RuntimeError, match=r"(?i)future"):
        wrapped(torch.ones(1, 2)).sum().backward()


@on_ranks(1)
def test_bad_hooks_are_refused_by_name(rank):
    wrapped = brigade.DistributedDataParallel(nn.Linear(2, 1))

    def wrong_bucket(state: object, bucket: int):
        raise NotImplementedError

    def wrong_result(state: object, bucket: dist.GradBucket) -> torch.futures.Future[int]:
        raise NotImplementedError

    with pytest.raises(TypeError, match="callable, got 1"):
        wrapped.register_comm_hook(None, 1)
    with pytest.raises(ValueError, match=r"wrong_bucket.*<class 'int'>"):
        wrapped.register_comm_hook(None, wrong_bucket)
    with pytest.raises(ValueError, match="wrong_result"):
        wrapped.register_comm_hook(None, wrong_result)
    assert "wrong_result" in wrapped._get_ddp_logging_data()["error"]
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match=r"fp16_compress_hook.*is allreduce_hook already"):
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert wrapped._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"


def _register_buffer_hook(hook, wrapped):
    wrapped._register_buffer_comm_hook(None, hook)


@on_ranks()
def test_buffer_hooks_are_awaited_at_the_end_of_backward(rank):
    def average(state, buffers):
        return [
            dist.all_reduce(b, async_op=True).get_future()
            for b in buffers.values()
            if b.is_floating_point()
        ]

    results = both(
        Perceptron,
        inputs(rank, 4),
        functools.partial(_register_buffer_hook, average),
    )
    assert_same_bits(results)
