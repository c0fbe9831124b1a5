"""Whatever is handed in or goes wrong: an error that says so, no crash, no hang."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import brigade

from cases import quick
from ranks import on_ranks

TIMEOUT_S = 20


# -------------------------------------------------------------------- types


def _wrap(*args, **options):
    return brigade.DistributedDataParallel(*(args or (nn.Linear(2, 2),)), **options)


def _reducer(params=None, buckets=((0, 1),), limits=(1,), group=None, **options):
    if params is None:
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    return brigade.Reducer(params, buckets, limits, group or dist.group.WORLD, **options)


def _backward_with(hook):
    wrapped = _wrap()
    wrapped.register_comm_hook(None, hook)
    wrapped(torch.ones(1, 2)).sum().backward()


def _done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


ANY = (TypeError, ValueError, RuntimeError)
WRONG = {
    # DistributedDataParallel
    "no module": (TypeError, "torch.nn.Module", lambda: _wrap(None)),
    "a number as module": (TypeError, "got 3", lambda: _wrap(3)),
    "a class as module": (TypeError, "Linear", lambda: _wrap(nn.Linear)),
    "a tensor as module": (TypeError, "got tensor", lambda: _wrap(torch.ones(2))),
    "a name as device": (ValueError, "device_ids", lambda: _wrap(device_ids="cuda")),
    "a device on the CPU": (ValueError, "device_ids", lambda: _wrap(device_ids=["cpu"])),
    "an output device": (ValueError, "output_device", lambda: _wrap(output_device="x")),
    "a name as group": (TypeError, "process_group", lambda: _wrap(process_group="gloo")),
    "a number as group": (TypeError, "process_group", lambda: _wrap(process_group=3)),
    "a number as mesh": (TypeError, "device_mesh", lambda: _wrap(device_mesh=3)),
    "a text as cap": (TypeError, "bucket_cap_mb", lambda: _wrap(bucket_cap_mb="25")),
    "a negative cap": (ValueError, "bucket_cap_mb", lambda: _wrap(bucket_cap_mb=-1)),
    "no number as cap": (ValueError, "bucket_cap_mb", lambda: _wrap(bucket_cap_mb=float("nan"))),
    "an endless cap": (ValueError, "bucket_cap_mb", lambda: _wrap(bucket_cap_mb=float("inf"))),
    "a huge cap": (ValueError, "bucket_cap_mb", lambda: _wrap(bucket_cap_mb=1e30)),
    "a number as caps": (TypeError, "bucket_cap_mb_list", lambda: _wrap(bucket_cap_mb_list=3)),
    "texts as caps": (TypeError, "bucket_cap_mb_list", lambda: _wrap(bucket_cap_mb_list=["a"])),
    "a negative cap of many": (
        ValueError,
        "bucket_cap_mb_list",
        lambda: _wrap(bucket_cap_mb_list=[1, -1]),
    ),
    "a text as flag": (TypeError, "", lambda: _wrap(find_unused_parameters="no")),
    "a list as flag": (TypeError, "", lambda: _wrap(static_graph=[1])),
    "numbers as delayed parameters": (
        TypeError,
        "delay_all_reduce_named_params",
        lambda: _wrap(delay_all_reduce_named_params=[1], param_to_hook_all_reduce=3),
    ),
    "a number as delayed parameter": (
        TypeError,
        "delay_all_reduce_named_params",
        lambda: _wrap(delay_all_reduce_named_params=[("w", 3)], param_to_hook_all_reduce=3),
    ),
    # Reducer
    "no parameters": (RuntimeError, "at least 1", lambda: _reducer([], [], [])),
    "numbers as parameters": (TypeError, "", lambda: _reducer([1])),
    "None as parameter": (TypeError, "", lambda: _reducer([None])),
    "a constant as parameter": (RuntimeError, "gradient", lambda: _reducer([torch.ones(2)])),
    "texts as indices": (TypeError, "", lambda: _reducer(buckets=[["a"]])),
    "a negative index": (TypeError, "", lambda: _reducer(buckets=[[-1]])),
    "an index too large": (RuntimeError, "lists parameter 5", lambda: _reducer(buckets=[[0, 5]])),
    "an index twice": (RuntimeError, "exactly one", lambda: _reducer(buckets=[[0, 0, 1]])),
    "too many limits": (RuntimeError, "per_bucket_size_limits", lambda: _reducer(limits=[1, 2])),
    "a text as reducer's group": (TypeError, "", lambda: _reducer(group="x")),
    "too few sparse flags": (
        RuntimeError,
        "expect_sparse",
        lambda: _reducer(expect_sparse_gradients=[True]),
    ),
    "a name too many": (
        RuntimeError,
        "names parameter 5",
        lambda: _reducer(param_to_name_mapping={5: "x"}),
    ),
    "None as output": (TypeError, "", lambda: _reducer().prepare_for_backward(None)),
    "numbers as outputs": (TypeError, "", lambda: _reducer().prepare_for_backward([1])),
    "no work": (TypeError, "", lambda: _reducer()._set_forward_pass_work_handle(None, True)),
    "no future": (TypeError, "", lambda: _reducer()._install_post_backward_futures([None])),
    "no group": (TypeError, "", lambda: _reducer()._update_process_group(None)),
    "no bucket": (TypeError, "", lambda: _reducer()._run_allreduce_hook(None)),
    "a rate of 0": (
        ValueError,
        "at least 1",
        lambda: _reducer()._set_ddp_runtime_logging_sample_rate(0),
    ),
    # Hooks
    "no hook": (TypeError, "callable", lambda: _wrap().register_comm_hook(None, None)),
    "a number as built-in": (TypeError, "", lambda: _wrap()._register_builtin_comm_hook(3)),
    "None from a hook": (
        RuntimeError,
        "<lambda>.*returned None",
        lambda: _backward_with(lambda state, bucket: None),
    ),
    "a number from a hook": (
        RuntimeError,
        "<lambda>.*returned 3",
        lambda: _backward_with(lambda state, bucket: 3),
    ),
    "a future of a number": (ANY, "", lambda: _backward_with(lambda s, b: _done(3))),
    "a future of too much": (ANY, "", lambda: _backward_with(lambda s, b: _done(torch.ones(600)))),
    "a future of too little": (ANY, "", lambda: _backward_with(lambda s, b: _done(torch.ones(2)))),
    "a future on no device": (
        ANY,
        "",
        lambda: _backward_with(lambda s, b: _done(torch.ones(6, device="meta"))),
    ),
    "a buffer set to None": (ANY, "", lambda: _backward_with(lambda s, b: b.set_buffer(None))),
    "a buffer resized": (
        ANY,
        "",
        lambda: _backward_with(lambda s, b: _done(b.buffer().resize_(0))),
    ),
    "a hook of no arguments": (TypeError, "argument", lambda: _backward_with(lambda: None)),
}


@on_ranks(1)
def test_what_is_of_a_wrong_type_is_refused(rank):
    failures = []
    for name, (kind, text, call) in WRONG.items():
        print(name, flush=True)  # what crashed, if it does
        try:
            with pytest.raises(kind, match=text):
                call()
        except (AssertionError, pytest.fail.Exception, Exception) as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)
    # The group goes on working.
    wrapped = _wrap()
    wrapped(torch.ones(1, 2)).sum().backward()
    assert wrapped.module.weight.grad.eq(1).all()


# ------------------------------------------------------------------- module


def _add(wrapped):
    wrapped.module.extra = nn.Linear(2, 2)


def _add_deeply(wrapped):
    wrapped.module[0].extra = nn.Parameter(torch.ones(1))


def _remove(wrapped):
    del wrapped.module[1]


def _remove_one(wrapped):
    wrapped.module[1].bias = None


def _replace(wrapped):
    wrapped.module[1] = nn.Linear(4, 2)


def _move(wrapped):
    wrapped.double()


def _resize(wrapped):
    wrapped.module[1].weight.data = torch.ones(5, 4)
    wrapped.module[1].bias.data = torch.ones(5)


def _reshape(wrapped):
    module = wrapped.module
    module[0].weight.data = torch.ones(2, 6)
    module.forward = lambda x: module[1](x @ module[0].weight.view(4, 3).t() + module[0].bias)


CHANGES = {
    _add: r"added: 'extra.weight', 'extra.bias'",
    _add_deeply: r"added: '0.extra'",
    _remove: r"removed: '1.weight', '1.bias'",
    _remove_one: r"removed: '1.bias'",
    _replace: r"replaced: '1.weight', '1.bias'",
    _move: r"'0.weight'.*was moved or cast",
    _resize: r"'1.weight'.*had shape \[2, 4\].*it has \[5, 4\]",
    _reshape: r"'0.weight'.*had shape \[4, 3\].*it has \[2, 6\]",
}


def _changed_with(change, options):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    wrapped = brigade.DistributedDataParallel(model, **options)
    x = torch.ones(2, 3)
    for _ in range(2):
        wrapped(x).sum().backward()
    change(wrapped)
    for _ in range(2):  # again and again
        with pytest.raises(RuntimeError, match=CHANGES[change]):
            wrapped(x.to(next(wrapped.parameters()).dtype))
    assert wrapped._get_ddp_logging_data()["has_error"]
    with torch.no_grad():
        wrapped(x.to(next(wrapped.parameters()).dtype))
    # Wrapped anew it trains.
    module, dtype = wrapped.module, next(wrapped.parameters()).dtype
    del wrapped
    gc.collect()
    module.zero_grad()
    again = brigade.DistributedDataParallel(module, **options)
    again(x.to(dtype)).sum().backward()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@on_ranks(1)
def test_a_change_of_the_wrapped_module_is_named_at_the_next_forward(rank, change):
    for options in ({}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}):
        _changed_with(change, options)


@on_ranks(1)
def test_an_unfrozen_parameter_is_named_at_the_next_forward(rank):
    model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))
    wrapped = brigade.DistributedDataParallel(model)
    x = torch.ones(2, 3)
    wrapped(x).sum().backward()
    model[0].weight.requires_grad_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"unfrozen: '0.weight'"):
            wrapped(x)
    model[0].weight.requires_grad_(False)
    wrapped(x).sum().backward()
    assert model[0].weight.grad is None


@on_ranks(1)
def test_changes_that_leave_the_parameters_alone_are_none(rank):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    wrapped = brigade.DistributedDataParallel(model)
    x = torch.ones(2, 3)
    for change in (
        lambda: None,
        lambda: model[0].register_buffer("more", torch.ones(1)),
        lambda: prune.identity(model[0], "weight"),  # under another name
        lambda: setattr(model, "frozen", nn.Linear(2, 2).requires_grad_(False)),
        lambda: setattr(model, "activation", nn.ReLU()),
        lambda: torch.func.functional_call(
            wrapped, {"module.1.bias": torch.ones(2, requires_grad=True)}, x
        ),
    ):
        change()
        for _ in range(2):
            wrapped(x).sum().backward()


# -------------------------------------------------------------------- hooks


SPOILS = [
    lambda tensor: tensor.fill_(float("nan")),
    lambda tensor: tensor.resize_(1),
    lambda tensor: tensor.resize_(10_000).fill_(7),
]


@pytest.mark.parametrize("views", [False, True])
@on_ranks()
def test_a_hook_may_keep_a_buckets_tensor_and_spoil_it_later(rank, views):
    kept = []

    def hook(state, bucket):
        kept.append(bucket.buffer())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / 2)

    for spoil in SPOILS:
        wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2), gradient_as_bucket_view=views)
        wrapped.register_comm_hook(None, hook)
        for _ in range(4):
            wrapped.zero_grad()
            wrapped(torch.full((1, 3), rank + 1.0)).sum().backward()
            assert wrapped.module.weight.grad.eq(1.5).all()
            spoil(kept[-1])
            if not views:
                assert wrapped.module.weight.grad.eq(1.5).all()
    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2))
    wrapped.register_comm_hook(None, hook)
    for _ in range(2):  # afterwards buckets stay
        wrapped(torch.ones(1, 3)).sum().backward()
    kept[-1].set_(torch.full((1,), 7.0).untyped_storage())
    wrapped.zero_grad()
    wrapped(torch.ones(1, 3)).sum().backward()
    assert wrapped.module.weight.grad.eq(1).all()


# ---------------------------------------------------- groups, forks, exits


def _small(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return brigade.DistributedDataParallel(model, **options)


def _step(wrapped):
    wrapped.zero_grad()
    wrapped(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("between", [False, True])
@on_ranks(timeout_s=TIMEOUT_S)
def test_a_destroyed_group_does_no_harm(rank, between):
    wrapped = _small()
    _step(wrapped)
    output = wrapped(torch.ones(2, 3)).sum()
    if not between:
        output.backward()
    dist.barrier()
    dist.destroy_process_group()
    with contextlib.suppress(RuntimeError):  # the reducer may have kept the group alive
        output.backward() if between else _step(wrapped)
    torch.save(wrapped.module.state_dict(), io.BytesIO())
    with pytest.raises(ValueError, match="init"):
        _small()


def _fork(child):
    """Calls `child` in a fork; returns how that ended."""
    process = os.fork()
    if process == 0:
        try:
            child()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@on_ranks(timeout_s=TIMEOUT_S)
def test_a_fork_is_told_to_wrap_its_own_model(rank):
    wrapped = _small()
    _step(wrapped)

    def child():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="fork"):
                _step(wrapped)
        with torch.no_grad():
            wrapped.module(torch.ones(2, 3))

    assert _fork(child) == 0
    _step(wrapped)
    del child

    def leaves():
        nonlocal wrapped
        wrapped = None
        gc.collect()

    assert _fork(leaves) == 0
    _step(wrapped)


# Both ranks train; rank 1 runs a line of its own in between.
_PROGRAM = """
import datetime, os, sys
import torch
import torch.distributed as dist
from torch import nn
import brigade

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method="file://" + os.environ["TEST_STORE"], rank=rank,
    world_size=2, timeout=datetime.timedelta(seconds=15),
)
state, x = [None], torch.ones(2, 3)

def hook(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    if state[0]:
        state[0]()
    return work.get_future().then(lambda done: done.value()[0])

def step():
    wrapped(x).sum().backward()

model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
wrapped = brigade.DistributedDataParallel(model, bucket_cap_mb=1e-5)
wrapped.register_comm_hook(state, hook)
step()
step()
dist.barrier()
if rank == 1:
    exec(os.environ["TEST_LINE"])
else:
    step()
    step()
"""


# A thread of a process group that works without the GIL, and then drops Python objects.
_BUSY_THREAD = """
import hashlib, threading

store = dist.HashStore()

def connect(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=30))

groups = [None, None]
late = threading.Thread(target=connect, args=(1,))
late.start()
connect(0)
late.join()

began = threading.Event()
data = bytes(500_000_000)

def be_busy(done):
    began.set()
    hashlib.sha256(data).digest()

groups[0].allreduce([x.clone()]).get_future().then(be_busy)
groups[1].allreduce([x.clone()])
began.wait()
"""

# What is in flight when the interpreter of rank 1 exits, and how both ranks end;
# rank 0 of the first may end before it misses its peer.
EXITS = {
    "a forward": ("wrapped(x)", 0, None),
    "a busy thread of a group": (_BUSY_THREAD, 0, 1),
    "an exit in a hook": ("state[0] = lambda: sys.exit(5); step()", 5, 1),
    "an exit in backward": (
        "wrapped.module[0].weight.register_hook(lambda gradient: sys.exit(6)); step()",
        6,
        1,
    ),
}


@pytest.mark.parametrize("name", quick(EXITS, ["an exit in backward"]))
def test_an_interpreter_may_exit_with_work_in_flight(name, tmp_path):
    source, *codes = EXITS[name]
    files, processes = [tmp_path / f"output_{rank}" for rank in range(2)], []
    for rank, file in enumerate(files):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "TEST_LINE": source,
            "TEST_STORE": str(tmp_path / "store"),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONFAULTHANDLER": "1",
        }
        command = [sys.executable, "-c", _PROGRAM]
        with open(file, "wb") as output:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    try:
        for process in processes:
            process.wait(timeout=300)
    finally:
        for process in processes:
            process.kill()
    outputs = [file.read_text(errors="replace") for file in files]
    ended = [process.returncode for process in reversed(processes)]
    assert min(ended) >= 0 and ended[0] == codes[0], (ended, outputs)
    if codes[1] is not None:
        assert ended[1] == codes[1] and "Error" in outputs[0], (ended, outputs)
