"""torch's comm hooks, optimizers and join() with brigade's wrapper: the bits of torch's class.

Not tested, because torch's class can't use them on Gloo either (torch 2.15):
batched_powerSGD_hook, hook_with_zero_step_interleaved, and PowerSGD and quantization with several
buckets, whose collectives have another order on each rank.
"""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import (
    ZeroRedundancyOptimizer,
)

from cases import pairwise
from ranks import on_ranks
from training import CLASSES, Perceptron, assert_same_bits, inputs, loss_of

SEVERAL_BUCKETS = {"bucket_cap_mb": 64 / 2**20}  # the Perceptron's 700 bytes in 4


def wrap(wrapper, **options):
    torch.manual_seed(0)
    return wrapper(Perceptron(), **options)


def sgd(wrapped):
    return torch.optim.SGD(wrapped.parameters(), lr=1 / 128, momentum=0.5)


def take_steps(wrapped, optimizer, batches):
    for batch in batches:
        wrapped.zero_grad()
        loss_of(wrapped(batch)).backward()
        optimizer.step()


def parameters_of(wrapped):
    return [parameter.tolist() for parameter in wrapped.parameters()]


def state_of(wrapped):
    return [tensor.clone() for tensor in wrapped.state_dict().values()]


def ranks_agree(wrapped):
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, parameters_of(wrapped))
    return all(other == by_rank[0] for other in by_rank[1:])


def expect_same_bits(run):
    """Compares the results of `run`, which trains with a class: the wrapper and other tensors."""
    results = {}
    for name, wrapper in CLASSES.items():
        wrapped, *others = run(wrapper)
        results[name] = state_of(wrapped) + others
    assert_same_bits(results)
    return wrapped


# ------------------------------------------------------------------- comm hooks


def no_state():
    return None


def power_sgd(**options):
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **options)


def chained(state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(2)).then(lambda done: done.value() * 3)


# By name: (state, hook, options of the wrapper, whether ranks end with equal parameters)
HOOKS = {
    "allreduce": (no_state, default_hooks.allreduce_hook, SEVERAL_BUCKETS, True),
    "fp16": (no_state, default_hooks.fp16_compress_hook, SEVERAL_BUCKETS, True),
    "bf16": (no_state, default_hooks.bf16_compress_hook, SEVERAL_BUCKETS, True),
    "noop": (no_state, debugging_hooks.noop_hook, SEVERAL_BUCKETS, False),
    "chained": (no_state, chained, SEVERAL_BUCKETS, True),
    "power_sgd_of_batches": (
        lambda: power_sgd(matrix_approximation_rank=2, batch_tensors_with_same_shape=True),
        powerSGD_hook.powerSGD_hook,
        {},
        True,
    ),
    "power_sgd_in_bf16": (
        power_sgd,
        default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        {},
        True,
    ),
}
if torch.torch_version.TorchVersion(torch.__version__) >= (2, 15):
    # Older torchs' hooks can't read the result of Gloo's all-gather.
    HOOKS |= {
        "quantization_pertensor": (
            no_state,
            quantization_hooks.quantization_pertensor_hook,
            {},
            True,
        ),
    }


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", HOOKS)
@on_ranks()
def test_a_hook_gives_the_same_bits(rank, name, views):
    make_state, hook, options, agree = HOOKS[name]

    def run(wrapper):
        wrapped = wrap(wrapper, gradient_as_bucket_view=views, **options)
        wrapped.register_comm_hook(make_state(), hook)
        take_steps(wrapped, sgd(wrapped), inputs(rank, 5))
        return (wrapped,)

    assert ranks_agree(expect_same_bits(run)) == agree


# -------------------------------------------------------- optimizers inside hooks


@pairwise(views=[False, True], some=[False, True])
@on_ranks()
def test_an_optimizer_steps_in_the_hook(rank, some, views):
    def run(wrapper):
        wrapped = wrap(wrapper, gradient_as_bucket_view=views, **SEVERAL_BUCKETS)
        start = parameters_of(wrapped)
        only = list(wrapped.parameters())[::2] if some else None
        wrapped._register_fused_optim(torch.optim.Adam, lr=1 / 128, optim_params=only)
        for batch in inputs(rank, 4):
            wrapped.zero_grad()
            loss_of(wrapped(batch)).backward()
        moved = [a != b for a, b in zip(parameters_of(wrapped), start, strict=True)]
        assert all(moved[::2]) and any(moved[1::2]) is not some
        return (wrapped,)

    assert ranks_agree(expect_same_bits(run))


# -------------------------------------------------------- optimizers of shards


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("as_views", [False, True])
@on_ranks()
def test_an_optimizer_of_shards_updates_the_same_bits(rank, as_views, views):
    def run(wrapper):
        wrapped = wrap(wrapper, gradient_as_bucket_view=views, **SEVERAL_BUCKETS)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(),
            torch.optim.Adam,
            parameters_as_bucket_view=as_views,
            lr=1 / 128,
        )
        take_steps(wrapped, optimizer, inputs(rank, 4))
        optimizer.consolidate_state_dict(to=0)
        moments = optimizer.state_dict()["state"] if rank == 0 else {}
        return wrapped, *(moments[i]["exp_avg"] for i in sorted(moments))

    assert ranks_agree(expect_same_bits(run))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("shard_buckets", [False, True])
@on_ranks()
def test_an_optimizer_of_shards_steps_in_the_hook(rank, shard_buckets, views):
    def run(wrapper):
        group = dist.new_group(backend="cpu:gloo")  # torch rejects the backend name "gloo" here
        wrapped = wrap(
            wrapper, process_group=group, gradient_as_bucket_view=views, **SEVERAL_BUCKETS
        )
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.SGD, group, overlap_with_ddp=True, lr=1 / 128
        )
        hook = ddp_zero_hook.hook_with_zero_step(
            default_hooks.allreduce_hook, wrapped, optimizer, shard_buckets
        )
        wrapped.register_comm_hook(None, hook)
        seen = [parameters_of(wrapped)]
        for batch in inputs(rank, 5):
            wrapped.zero_grad()
            loss_of(wrapped(batch)).backward()
            seen.append(parameters_of(wrapped))
        # Parameters change only after the hook has seen the rebuilt buckets.
        assert [a != b for a, b in itertools.pairwise(seen)] == [False, False, True, True, True]
        assert len(optimizer._overlap_info.params_per_bucket) > 1
        return (wrapped,)

    assert ranks_agree(expect_same_bits(run))


# ------------------------------------------------------------------------- join


@pairwise(views=[False, True], by_initial=[True, False], batches=[(2, 4), (4, 1), (0, 2)])
@on_ranks()
def test_model_and_optimizer_join_together(rank, batches, by_initial, views):
    def run(wrapper):
        wrapped = wrap(wrapper, gradient_as_bucket_view=views, **SEVERAL_BUCKETS)
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=1 / 128)
        with Join([wrapped, optimizer], divide_by_initial_world_size=by_initial):
            take_steps(wrapped, optimizer, inputs(rank, batches[rank]))
        joined = state_of(wrapped)
        take_steps(wrapped, optimizer, inputs(rank, 1))
        return wrapped, *joined

    assert ranks_agree(expect_same_bits(run))


# ------------------------------------------------------------------ dataclasses


@dataclasses.dataclass
class Inner:
    hidden: list[torch.Tensor]
    nothing: torch.Tensor | None = None


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    inner: Inner
    name: str = "output"


class Structured(nn.Module):
    """Each tensor of the output depends on its own layer."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.body, self.head, self.side = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(6, 2)
        if unused:
            self.extra = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Output:
        body = self.body(x).relu()
        return Output(self.head(body), Inner([body, self.side(x)]))


@pytest.mark.parametrize(
    ("unused", "options"),
    [
        (False, {}),
        (True, {"find_unused_parameters": True}),
        (False, {"static_graph": True}),
        (True, {"static_graph": True}),
    ],
    ids=str,
)
@on_ranks()
def test_forward_may_return_a_dataclass(rank, unused, options):
    def run(wrapper):
        torch.manual_seed(0)
        given = options
        if wrapper is CLASSES["torch"] and "static_graph" in options:
            # torch does not find tensors in this dataclass and does not reduce, so ranks diverge.
            given = {"find_unused_parameters": True}
        wrapped = wrapper(Structured(unused), **SEVERAL_BUCKETS, **given)
        optimizer = sgd(wrapped)
        for batch in inputs(rank, 4):
            optimizer.zero_grad()
            output = wrapped(batch)
            assert type(output) is Output and type(output.inner) is Inner
            assert output.name == "output" and output.inner.nothing is None
            loss_of([output.logits, *output.inner.hidden]).backward()
            optimizer.step()
        return wrapped, *(p.grad for p in wrapped.parameters())

    assert ranks_agree(expect_same_bits(run))
