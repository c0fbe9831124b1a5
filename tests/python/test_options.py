"""Options of the wrapper: what each does, beside torch's own class."""

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import brigade

from ranks import run_ranks
from training import CLASSES, Perceptron, assert_equal, assert_same_bits, both, inputs, train


def _changed(rank, check, expected):
    wrapped = brigade.DistributedDataParallel(nn.Sequential(nn.Linear(3, 2)), check_module=check)
    wrapped.module.append(nn.Linear(2, 2))
    x = torch.full((1, 3), float(rank))
    for _ in range(2):
        wrapped.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if expected is RuntimeError:
                with pytest.raises(RuntimeError, match=r"added: '1\.weight'"):
                    wrapped(x)
                return
            wrapped(x).sum().backward()
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (expected is UserWarning)
        assert all("added: '1.weight', '1.bias'" in text for text in texts)
        average = wrapped.module[0].weight.grad / wrapped.module[1].weight.sum(0)[:, None]
        assert torch.allclose(average, torch.full((2, 3), 0.5))  # the others are reduced


@pytest.mark.parametrize(
    ("check", "expected"), [("error", RuntimeError), ("warn", UserWarning), ("off", None)]
)
def test_a_changed_module_is_an_error_a_warning_or_nobodys_business(check, expected):
    run_ranks(_changed, check, expected)


def _unknown_check(rank):
    with pytest.raises(ValueError, match="check_module must be one of error, warn, off"):
        brigade.DistributedDataParallel(nn.Linear(2, 2), check_module="no")
    with pytest.raises(TypeError, match="positional"):
        brigade.DistributedDataParallel(nn.Linear(2, 2), *[None] * 20, "off")


def test_checks_are_named_and_given_by_name():
    run_ranks(_unknown_check, world_size=1)


class _OwnBuffer(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.tensor([float(rank + 1)]))

    def forward(self, x):
        return self.layer(x)


_OURS = {"brigade": brigade.DistributedDataParallel}


def _classes_with(argument):
    """Brigade's, and torch's if its version knows the argument."""
    known = inspect.signature(CLASSES["torch"]).parameters
    return CLASSES if argument in known else _OURS


def _synced(rank, options, at_construction, in_forward):
    for wrapper in _classes_with("forward_sync_buffers").values():
        wrapped = wrapper(_OwnBuffer(rank), **options)
        assert wrapped.module.seen.item() == (1 if at_construction else rank + 1)
        assert wrapped.forward_sync_buffers is wrapped.broadcast_buffers is in_forward
        wrapped.module.seen.fill_(10.0 + rank)
        wrapped(torch.ones(1, 2)).sum().backward()
        assert wrapped.module.seen.item() == (10 if in_forward else 10 + rank)
        wrapped.broadcast_buffers = not in_forward
        assert wrapped.forward_sync_buffers is not in_forward
        wrapped.module.seen.fill_(20.0 + rank)
        wrapped(torch.ones(1, 2)).sum().backward()
        assert wrapped.module.seen.item() == (20 + rank if in_forward else 20)


@pytest.mark.parametrize(
    ("options", "at_construction", "in_forward"),
    [
        ({}, True, True),
        ({"broadcast_buffers": True}, True, True),
        ({"broadcast_buffers": False}, False, False),
        ({"forward_sync_buffers": True}, True, True),
        ({"forward_sync_buffers": False}, True, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
        ({"broadcast_buffers": True, "forward_sync_buffers": False}, True, False),
    ],
    ids=str,
)
def test_buffers_are_synced_where_torch_syncs_them(options, at_construction, in_forward):
    run_ranks(_synced, options, at_construction, in_forward)


def _deprecated(rank):
    for options, count in (
        ({}, 0),
        ({"forward_sync_buffers": False}, 0),
        ({"broadcast_buffers": True}, 1),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, 1),
    ):
        for wrapper in CLASSES.values():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                wrapper(nn.Linear(2, 2), **options)
            found = [w for w in caught if "`broadcast_buffers` is deprecated" in str(w.message)]
            assert len(found) == count, (wrapper, options)
            assert all(w.category is FutureWarning and w.filename == __file__ for w in found)


@pytest.mark.skipif(
    not hasattr(TorchDistributedDataParallel, "broadcast_buffers"), reason="not in this torch"
)
def test_broadcast_buffers_is_deprecated_as_torchs_is():
    run_ranks(_deprecated, world_size=1)


def _join_leaves_buffers(rank):
    wrapped = brigade.DistributedDataParallel(_OwnBuffer(rank), forward_sync_buffers=False)
    wrapped.module.seen.fill_(10.0 + rank)
    with wrapped.join():
        for _ in range(1 + rank):
            wrapped(torch.ones(1, 2)).sum().backward()
    assert wrapped.module.seen.item() == 10 + rank


def test_join_leaves_buffers_alone_that_forward_does_not_sync():
    run_ranks(_join_leaves_buffers)


def _add_up_in_group(wrapped):
    if isinstance(wrapped, brigade.DistributedDataParallel):
        wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def _batched(rank, views):
    results = {
        batched: both(
            Perceptron,
            inputs(rank, 3),
            prepare=_add_up_in_group,
            batched_grad_copy=batched,
            gradient_as_bucket_view=views,
            bucket_cap_mb=1e-5,
        )
        for batched in (False, True)
    }
    assert_same_bits(results[False])
    assert_equal(results[True]["brigade"], results[False]["brigade"])


@pytest.mark.parametrize("views", [False, True])
def test_batched_copies_have_the_bits_of_torchs_default(views):
    run_ranks(_batched, views, world_size=3)


def _lazy(rank, views, options):
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 1e-5, **options}
    batches = inputs(rank, 4)
    expected = both(Perceptron, batches, **options)["torch"]
    for wrapper in _classes_with("lazy_bucket_allocation").values():
        torch.manual_seed(0)
        lazy = wrapper(Perceptron(), lazy_bucket_allocation=True, **options)
        assert_equal(train(lazy, batches), expected)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_lazily_allocated_buckets_train_to_the_same_bits(views, options):
    run_ranks(_lazy, views, options)


def _leaves_out(rank):
    module = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    module.forward = lambda x, parts: sum(module[part](x).sum() for part in parts)
    wrapped = brigade.DistributedDataParallel(
        module, bucket_cap_mb=1e-6, one_backward_per_forward=True
    )
    x = torch.full((1, 2), float(rank))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(?s)2 of 4 parameters got no gradient.*on rank 0"):
            wrapped(x, "a" if rank == 0 else "ab").backward()
        assert wrapped.can_continue()
        wrapped.zero_grad()
        wrapped(x, "ab").backward()
        for part in "ab":
            assert torch.equal(module[part].weight.grad, torch.full((1, 2), 0.5))


def test_one_backward_per_forward_tells_of_what_it_left_out_when_it_ends():
    run_ranks(_leaves_out)


def _train_twice(wrapped, x):
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(x).sum().backward()
        assert wrapped.module.weight.grad.item() == 1.5


def _fail_in_backward(wrapped, x):
    def fail(_):
        raise ValueError("no disk")

    output = wrapped(x)
    output.register_hook(fail)
    with pytest.raises(ValueError, match="no disk"):
        output.sum().backward()


def _hears_of_it_at_once(rank):
    wrapped = brigade.DistributedDataParallel(
        nn.Linear(1, 1, bias=False), max_unconfirmed_iterations=3
    )
    x = torch.full((1, 1), float(rank + 1))
    _train_twice(wrapped, x)
    if rank == 1:
        _fail_in_backward(wrapped, x)
    else:
        with pytest.raises(dist.DistBackendError, match="rank 1 failed in iteration 3"):
            wrapped(x).sum().backward()
    assert wrapped.can_continue()
    _train_twice(wrapped, x)


def test_on_the_cpu_a_failure_raises_in_the_same_backward_whatever_may_be_unconfirmed():
    run_ranks(_hears_of_it_at_once)


def _bucket_config(rank):
    for options in (
        {},
        {"bucket_cap_mb": 3},
        {"bucket_cap_mb_list": [1, 2.5]},
        {"bucket_cap_mb": 7, "bucket_cap_mb_list": [1, 2]},
    ):
        ours, theirs = (wrapper(nn.Linear(2, 2), **options) for wrapper in CLASSES.values())
        assert ours._bucket_config == theirs._bucket_config
        for name in ("bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default"):
            assert getattr(ours, name) == getattr(theirs, name), (name, options)


def test_buckets_are_configured_as_torchs():
    run_ranks(_bucket_config, world_size=1)


class _Outer(nn.Module):
    """Notes which wrapper the compiler would take for the active one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.layer = nn.Linear(2, 2)
        self.active = []

    def forward(self, x):
        self.active.append(TorchDistributedDataParallel._get_active_ddp_module())
        x = self.inner(x)
        self.active.append(TorchDistributedDataParallel._get_active_ddp_module())
        return self.layer(x)


def _nested(rank):
    for outer in CLASSES.values():
        for inner in CLASSES.values():
            model = _Outer(inner(nn.Linear(2, 2)))
            names = [f"inner.module.{name}" for name in ("weight", "bias")]
            outer._set_params_and_buffers_to_ignore_for_model(model, names)
            wrapped = outer(model)
            wrapped(torch.full((1, 2), float(rank))).sum().backward()
            assert model.active == [wrapped, wrapped]
            assert TorchDistributedDataParallel._get_active_ddp_module() is None
            for parameter in wrapped.parameters():
                gathered = [torch.empty_like(parameter) for _ in range(2)]
                dist.all_gather(gathered, parameter.grad)
                assert torch.equal(*gathered)
            with pytest.raises(RuntimeError):
                wrapped(torch.ones(1, 3))
            assert TorchDistributedDataParallel._get_active_ddp_module() is None
            wrapped.module.active.clear()


def test_a_wrapper_within_a_wrapper_gives_the_active_one_back():
    run_ranks(_nested)
