"""What torch ships to go with its wrapper goes with brigade's: same bits in the end.

Each companion is used as it is in the wheel. Left out, since torch's own class cannot
use them on Gloo either (torch 2.15):

* batched_powerSGD_hook hands 2-D matrices to a function that asserts 3-D ones.
* hook_with_zero_step_interleaved, and PowerSGD and quantization over several buckets start
  collectives in callbacks, which come in another order on each rank.

The hook of mixed_precision_hooks needs what `mixed_precision=` sets up, and
test_mixed_precision.py has that.
"""

import collections
import copy
import dataclasses
import gc
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    as_functional_optim,
)

from cases import pairwise
from ranks import run_ranks
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


def state_of(wrapped):
    return [tensor.clone() for tensor in wrapped.state_dict().values()]


def parameters_of(wrapped):
    return [parameter.tolist() for parameter in wrapped.parameters()]


def assert_ranks_agree(by_rank):
    assert all(other == by_rank[0] for other in by_rank[1:])


# ------------------------------------------------------------------- comm hooks


def no_state():
    return None


def power_sgd(**options):
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **options)


def power_sgd_without_memory():
    return power_sgd(use_error_feedback=False, warm_start=False)


def power_sgd_of_batches():
    return power_sgd(matrix_approximation_rank=2, batch_tensors_with_same_shape=True)


HOOKS = {
    "allreduce": (no_state, default_hooks.allreduce_hook),
    "fp16": (no_state, default_hooks.fp16_compress_hook),
    "bf16": (no_state, default_hooks.bf16_compress_hook),
    "fp16_around_allreduce": (
        no_state,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ),
    "bf16_around_allreduce": (
        no_state,
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    ),
    "noop": (no_state, debugging_hooks.noop_hook),
}
POWER_SGD = {
    "without_memory": (power_sgd_without_memory, powerSGD_hook.powerSGD_hook),
    "of_batches": (power_sgd_of_batches, powerSGD_hook.powerSGD_hook),
    "in_bf16": (power_sgd, default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
}


def _train_with(rank, make_state, hook, options):
    results = {}
    for name, wrapper in CLASSES.items():
        wrapped = wrap(wrapper, **options)
        wrapped.register_comm_hook(make_state(), hook)
        take_steps(wrapped, sgd(wrapped), inputs(rank, 5))
        results[name] = state_of(wrapped)
    assert_same_bits(results)
    return parameters_of(wrapped)


def _train_with_hook_of_several_buckets(rank, name, views):
    options = {"gradient_as_bucket_view": views, **SEVERAL_BUCKETS}
    return _train_with(rank, *HOOKS[name], options)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_over_several_buckets_gives_the_same_bits(name, views):
    by_rank = run_ranks(_train_with_hook_of_several_buckets, name, views)
    if name != "noop":
        assert_ranks_agree(by_rank)


def _train_with_power_sgd(rank, name, views):
    return _train_with(rank, *POWER_SGD[name], {"gradient_as_bucket_view": views})


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", POWER_SGD)
def test_power_sgd_gives_the_same_bits(name, views):
    assert_ranks_agree(run_ranks(_train_with_power_sgd, name, views))


def _train_with_quantization(rank, name, views):
    hook = getattr(quantization_hooks, f"quantization_{name}_hook")
    return _train_with(rank, no_state, hook, {"gradient_as_bucket_view": views})


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 15),
    reason="torch's quantization hooks cannot read what Gloo's all-gather leaves",
)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", ["pertensor", "perchannel"])
def test_quantization_gives_the_same_bits(name, views):
    assert_ranks_agree(run_ranks(_train_with_quantization, name, views))


def _goes_on_with_a_pickled_state(rank, views):
    batches = inputs(rank, 8)
    results = {}
    for name, wrapper in CLASSES.items():
        first = wrap(wrapper, gradient_as_bucket_view=views)
        state = power_sgd()
        first.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        take_steps(first, sgd(first), batches[:4])
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)

        restored = torch.load(file, weights_only=False)
        assert restored.iter == 4 and torch.equal(restored.error_dict[0], state.error_dict[0])
        second = wrapper(copy.deepcopy(first.module), gradient_as_bucket_view=views)
        second.register_comm_hook(restored, powerSGD_hook.powerSGD_hook)
        take_steps(second, sgd(second), batches[4:])
        assert restored.iter == 8
        results[name] = [*state_of(second), restored.error_dict[0], restored.q_memory_dict[0]]
    assert_same_bits(results)
    return parameters_of(second)


@pytest.mark.parametrize("views", [False, True])
def test_a_pickled_power_sgd_state_goes_on_with_a_new_wrapper(views):
    assert_ranks_agree(run_ranks(_goes_on_with_a_pickled_state, views))


# -------------------------------------------------------- optimizers inside hooks


def _register_then_optimizer(wrapped, only):
    optimizer = as_functional_optim(torch.optim.Adam, lr=1 / 128)
    state = optimizer_overlap_hooks._OptimizerHookState(optimizer, only)
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    wrapped.register_comm_hook(None, hook)


def _register_fused(wrapped, only):
    wrapped._register_fused_optim(torch.optim.Adam, lr=1 / 128, optim_params=only)


REGISTER = {"by_hand": _register_then_optimizer, "fused": _register_fused}


def _steps_in_the_hook(rank, register, some, views):
    results = {}
    for name, wrapper in CLASSES.items():
        wrapped = wrap(wrapper, gradient_as_bucket_view=views, **SEVERAL_BUCKETS)
        start = parameters_of(wrapped)
        parameters = list(wrapped.parameters())
        REGISTER[register](wrapped, parameters[::2] if some else None)
        for batch in inputs(rank, 4):
            wrapped.zero_grad()
            loss_of(wrapped(batch)).backward()
        results[name] = state_of(wrapped)
        moved = [a != b for a, b in zip(parameters_of(wrapped), start, strict=True)]
        assert all(moved[::2]) and any(moved[1::2]) is not some  # weights and biases
    assert_same_bits(results)
    return parameters_of(wrapped)


@pairwise(
    views=[False, True],
    some=[False, True],
    register=REGISTER,
)
def test_an_optimizer_steps_in_the_hook(register, some, views):
    assert_ranks_agree(run_ranks(_steps_in_the_hook, register, some, views))


# -------------------------------------------------------- optimizers of shards


def _shards(rank, as_views, views):
    results = {}
    for name, wrapper in CLASSES.items():
        wrapped = wrap(wrapper, gradient_as_bucket_view=views, **SEVERAL_BUCKETS)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(),
            torch.optim.Adam,
            parameters_as_bucket_view=as_views,
            lr=1 / 128,
        )
        take_steps(wrapped, optimizer, inputs(rank, 4))
        optimizer.consolidate_state_dict(to=0)
        results[name] = state_of(wrapped)
        if rank == 0:
            moments = optimizer.state_dict()["state"]
            results[name] += [moments[i]["exp_avg"] for i in sorted(moments)]
    assert_same_bits(results)
    return parameters_of(wrapped)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("as_views", [False, True])
def test_an_optimizer_of_shards_updates_the_same_bits(as_views, views):
    assert_ranks_agree(run_ranks(_shards, as_views, views))


def _shards_in_the_hook(rank, shard_buckets, views):
    results = {}
    for name, wrapper in CLASSES.items():
        group = dist.new_group(backend="cpu:gloo")  # one that is called "gloo" is refused
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
        # Nothing moves until the hook has seen the rebuilt buckets.
        assert [a != b for a, b in itertools.pairwise(seen)] == [False, False, True, True, True]
        assert len(optimizer._overlap_info.params_per_bucket) > 1
        results[name] = state_of(wrapped)
    assert_same_bits(results)
    return parameters_of(wrapped)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("shard_buckets", [False, True])
def test_an_optimizer_of_shards_steps_in_the_hook(shard_buckets, views):
    assert_ranks_agree(run_ranks(_shards_in_the_hook, shard_buckets, views))


# -------------------------------------------------------------- model averaging


def periodic():
    return PeriodicModelAverager(period=2, warmup_steps=2)


def hierarchical():
    groups = collections.OrderedDict([(1, 1), (2, dist.get_world_size())])
    return HierarchicalModelAverager(groups, warmup_steps=2)


AVERAGERS = {"periodic": periodic, "hierarchical": hierarchical}
STEPS = 5  # 0, 1, ... 4: averaged after steps 2 and 4


def _averages_after_local_steps(rank, averager, local_reduce, views):
    results = {}
    for name, wrapper in CLASSES.items():
        alone, _ = dist.new_subgroups(group_size=1)
        wrapped = wrap(wrapper, gradient_as_bucket_view=views, **SEVERAL_BUCKETS)
        state = post_localSGD_hook.PostLocalSGDState(
            None, alone, start_localSGD_iter=2, post_local_gradient_allreduce=local_reduce
        )
        wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(sgd(wrapped), AVERAGERS[averager]())
        take_steps(wrapped, optimizer, inputs(rank, STEPS))
        assert optimizer.averager.step == STEPS and state.iter == 2
        averaged, results[name] = parameters_of(wrapped), state_of(wrapped)
        take_steps(wrapped, optimizer, inputs(rank, 1))
        results[name] += state_of(wrapped)
    assert_same_bits(results)
    return averaged, parameters_of(wrapped)


@pairwise(
    views=[False, True],
    local_reduce=[False, True],
    averager=AVERAGERS,
)
def test_models_are_averaged_after_local_steps(averager, local_reduce, views):
    by_rank = run_ranks(_averages_after_local_steps, averager, local_reduce, views)
    assert_ranks_agree([averaged for averaged, _ in by_rank])
    (_, ours), (_, peers) = by_rank
    assert ours != peers  # the step after that was local


def _averages_without_a_hook(rank, averager):
    results = {}
    for name, wrapper in CLASSES.items():
        wrapped = wrap(wrapper)
        optimizer = sgd(wrapped)
        average = AVERAGERS[averager]()
        for batch in inputs(rank, STEPS):
            with wrapped.no_sync():
                take_steps(wrapped, optimizer, [batch])
            average.average_parameters(wrapped.parameters())
        averaged, results[name] = parameters_of(wrapped), state_of(wrapped)
        take_steps(wrapped, optimizer, inputs(rank, 2))  # reduces gradients again
        results[name] += state_of(wrapped)
    assert_same_bits(results)
    return averaged


@pytest.mark.parametrize("averager", AVERAGERS)
def test_models_are_averaged_instead_of_gradients(averager):
    assert_ranks_agree(run_ranks(_averages_without_a_hook, averager))


# ------------------------------------------------------------------------- join


class _Counter(Joinable):
    """Counts the inputs of all ranks, as the counter in torch's tutorial does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.last_joiners: list[bool] = []

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.count(1)

    def count(self, own: int) -> None:
        inputs_of_all = torch.tensor([own])
        dist.all_reduce(inputs_of_all)
        self.seen += int(inputs_of_all)

    def join_hook(self, **options: object) -> JoinHook:
        return _CounterHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


class _CounterHook(JoinHook):
    def __init__(self, counter: _Counter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        self.counter.count(0)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.last_joiners.append(is_last_joiner)


def _joins(rank, batches, by_initial, views):
    results = {}
    for name, wrapper in CLASSES.items():
        wrapped = wrap(wrapper, gradient_as_bucket_view=views, **SEVERAL_BUCKETS)
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=1 / 128)
        counter = _Counter()
        joinables = [wrapped, optimizer, counter]
        with Join(joinables, divide_by_initial_world_size=by_initial):
            for batch in inputs(rank, batches[rank]):
                take_steps(wrapped, optimizer, [batch])
                counter()
        assert counter.seen == sum(batches)
        assert counter.last_joiners == [batches[rank] == max(batches)]
        results[name] = state_of(wrapped)
        take_steps(wrapped, optimizer, inputs(rank, 1))
        results[name] += state_of(wrapped)
    assert_same_bits(results)
    return parameters_of(wrapped)


@pairwise(
    views=[False, True],
    by_initial=[True, False],
    batches=[(2, 4), (4, 1), (0, 2)],
)
def test_model_optimizer_and_counter_join_together(batches, by_initial, views):
    assert_ranks_agree(run_ranks(_joins, batches, by_initial, views))


# -------------------------------------------------------------------- new group


def _meets_again(rank, folder, keep):
    batches = inputs(rank, 4)
    results = {}
    for name, wrapper in CLASSES.items():
        first = wrap(wrapper, **SEVERAL_BUCKETS)
        take_steps(first, sgd(first), batches[:2])
        dist.barrier()
        dist.destroy_process_group()
        module = copy.deepcopy(first.module) if keep else first.module
        if not keep:
            del first
            gc.collect()
        store = f"file://{folder}/{name}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        second = wrapper(module, **SEVERAL_BUCKETS)
        take_steps(second, sgd(second), batches[2:])
        results[name] = state_of(second)
    assert_same_bits(results)
    return parameters_of(second)


@pytest.mark.parametrize("keep", [False, True])
def test_a_second_wrapper_trains_in_a_group_made_after_the_first_was_destroyed(tmp_path, keep):
    assert_ranks_agree(run_ranks(_meets_again, str(tmp_path), keep))


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
    """Each tensor of the output depends on a layer that no other one depends on."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.body, self.head, self.side = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(6, 2)
        if unused:
            self.extra = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Output:
        body = self.body(x).relu()
        return Output(self.head(body), Inner([body, self.side(x)]))


def _returns_a_dataclass(rank, unused, options):
    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        if name == "torch" and "static_graph" in options:
            # torch does not see a dataclass there, and does not reduce: ranks drift apart.
            options = {"find_unused_parameters": True}
        wrapped = wrapper(Structured(unused), **SEVERAL_BUCKETS, **options)
        optimizer = sgd(wrapped)
        for batch in inputs(rank, 4):
            optimizer.zero_grad()
            output = wrapped(batch)
            assert type(output) is Output and type(output.inner) is Inner
            assert output.name == "output" and output.inner.nothing is None
            loss_of([output.logits, *output.inner.hidden]).backward()
            optimizer.step()
        results[name] = [p.grad for p in wrapped.parameters()] + state_of(wrapped)
    assert_same_bits(results)
    return parameters_of(wrapped)


@pytest.mark.parametrize(
    ("unused", "options"),
    [
        (False, {}),
        (False, {"find_unused_parameters": True}),
        (True, {"find_unused_parameters": True}),
        (False, {"static_graph": True}),
        (True, {"static_graph": True}),
    ],
    ids=str,
)
def test_forward_may_return_a_dataclass(unused, options):
    assert_ranks_agree(run_ranks(_returns_a_dataclass, unused, options))
