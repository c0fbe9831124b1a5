"""Invalid arguments, modules and hooks: an error that names the cause, no crash, no hang."""

from __future__ import annotations

import contextlib
import functools
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
from training import completed_future

TIMEOUT_S = 20


# -------------------------------------------------------------------- types


def _wrap(*args, **options):
    return brigade.DistributedDataParallel(*(args or (nn.Linear(2, 2),)), **options)


def _reducer(**options):
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    return brigade.Reducer(parameters, [[0, 1]], [1], dist.group.WORLD, **options)


def _backward_with(hook):
    wrapped = _wrap()
    wrapped.register_comm_hook(None, hook)
    wrapped(torch.ones(1, 2)).sum().backward()


# Invalid values by option of the wrapper; the error names the option.
WRONG_OPTIONS = {
    "device_ids": ["cuda", ["cpu"]],
    "output_device": ["x"],
    "process_group": ["gloo", 3],
    "device_mesh": [3],
    "bucket_cap_mb": ["25", -1, float("nan"), float("inf"), 1e30],
    "bucket_cap_mb_list": [3, ["a"], [1, -1]],
    "delay_all_reduce_named_params": [[1], [("w", 3)]],
}
# (regex of the error, hook that causes it)
WRONG_HOOKS = [
    (
        r"<lambda> \(test_bad_input.py:\d+\)' must return .* found NoneType",
        lambda state, bucket: None,
    ),
    (r"found a torch.Tensor of shape \[6\]", lambda state, bucket: bucket.buffer()),
    ("argument", lambda: None),
    ("", lambda state, bucket: completed_future(3)),
    ("", lambda state, bucket: completed_future(torch.ones(600))),
    ("", lambda state, bucket: completed_future(torch.ones(2))),
    ("", lambda state, bucket: completed_future(torch.ones(6, device="meta"))),
    ("", lambda state, bucket: bucket.set_buffer(None)),
    ("", lambda state, bucket: completed_future(bucket.buffer().resize_(0))),
]
# (regex of the error, call that raises it)
WRONG = [
    *(
        ("torch.nn.Module", functools.partial(_wrap, m))
        for m in (None, 3, nn.Linear, torch.ones(2))
    ),
    ("", lambda: _wrap(find_unused_parameters="no")),
    ("names parameter 5", lambda: _reducer(param_to_name_mapping={5: "x"})),
    ("at least 1", lambda: _reducer()._set_ddp_runtime_logging_sample_rate(0)),
    ("callable", lambda: _wrap().register_comm_hook(None, None)),
    *((words, functools.partial(_backward_with, hook)) for words, hook in WRONG_HOOKS),
]


@on_ranks(1)
def test_values_of_a_wrong_type_are_errors(rank):
    for option, values in WRONG_OPTIONS.items():
        needs = {"param_to_hook_all_reduce": 3} if option.startswith("delay") else {}
        for value in values:
            with pytest.raises((TypeError, ValueError), match=option):
                _wrap(**{option: value}, **needs)
    for words, call in WRONG:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
            call()
    wrapped = _wrap()
    wrapped(torch.ones(1, 2)).sum().backward()
    assert wrapped.module.weight.grad.eq(1).all()


# ------------------------------------------------------------------- module


def _resize(module):
    module[1].weight.data = torch.ones(5, 4)
    module[1].bias.data = torch.ones(5)


def _reshape(module):
    module[0].weight.data = torch.ones(2, 6)
    module.forward = lambda x: module[1](x @ module[0].weight.view(4, 3).t() + module[0].bias)


CHANGES = {
    "added: 'extra.weight', 'extra.bias'": lambda m: m.add_module("extra", nn.Linear(2, 2)),
    "added: '0.extra'": lambda m: setattr(m[0], "extra", nn.Parameter(torch.ones(1))),
    "removed: '1.weight', '1.bias'": lambda m: m.pop(1),
    "removed: '1.bias'": lambda m: setattr(m[1], "bias", None),
    "replaced: '1.weight', '1.bias'": lambda m: setattr(m, "1", nn.Linear(4, 2)),
    "'0.weight'.*was moved or cast": nn.Module.double,
    r"'1.weight'.*had shape \[2, 4\].*it has \[5, 4\]": _resize,
    r"'0.weight'.*had shape \[4, 3\].*it has \[2, 6\]": _reshape,
}


def _changed_with(words, options):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    wrapped = brigade.DistributedDataParallel(model, **options)
    x = torch.ones(2, 3)
    for _ in range(2):
        wrapped(x).sum().backward()
    CHANGES[words](wrapped.module)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            wrapped(x.to(next(wrapped.parameters()).dtype))
    assert wrapped._get_ddp_logging_data()["has_error"]
    with torch.no_grad():
        wrapped(x.to(next(wrapped.parameters()).dtype))
    module, dtype = wrapped.module, next(wrapped.parameters()).dtype
    del wrapped
    gc.collect()
    module.zero_grad()
    again = brigade.DistributedDataParallel(module, **options)
    again(x.to(dtype)).sum().backward()


@pytest.mark.parametrize("words", CHANGES)
@on_ranks(1)
def test_the_next_forward_names_a_change_of_the_module(rank, words):
    for options in ({}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}):
        _changed_with(words, options)


@on_ranks(1)
def test_the_next_forward_names_an_unfrozen_parameter(rank):
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
def test_changes_that_keep_the_parameters_are_allowed(rank):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    wrapped = brigade.DistributedDataParallel(model)
    x = torch.ones(2, 3)
    for change in (
        lambda: None,
        lambda: model[0].register_buffer("more", torch.ones(1)),
        lambda: prune.identity(model[0], "weight"),
        lambda: setattr(model, "frozen", nn.Linear(2, 2).requires_grad_(False)),
        lambda: setattr(model, "activation", nn.ReLU()),
        lambda: torch.func.functional_call(
            wrapped, {"module.1.bias": torch.ones(2, requires_grad=True)}, x
        ),
    ):
        change()
        for _ in range(2):
            wrapped(x).sum().backward()


@on_ranks(1)
def test_a_module_may_be_its_own_descendant(rank):
    module = nn.Linear(2, 2)
    module.child = nn.Linear(2, 2)
    module.child.parent = module
    wrapped = brigade.DistributedDataParallel(module)
    wrapped(torch.ones(1, 2)).sum().backward()
    assert len(list(wrapped.parameters())) == 4


@on_ranks(1)
def test_a_parameter_ignored_by_its_second_name_may_be_unfrozen(rank):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].bias = module[0].bias.requires_grad_(False)
    module._ddp_params_and_buffers_to_ignore = ["1.bias"]
    wrapped = brigade.DistributedDataParallel(module)
    module[0].bias.requires_grad_(True)
    wrapped(torch.ones(1, 2)).sum().backward()


# -------------------------------------------------------------------- hooks


@pytest.mark.parametrize("views", [False, True])
@on_ranks()
def test_a_hook_may_keep_a_buckets_tensor_and_write_it_later(rank, views):
    kept = []

    def hook(state, bucket):
        kept.append(bucket.buffer())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / 2)

    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2), gradient_as_bucket_view=views)
    wrapped.register_comm_hook(None, hook)
    for size in (8, 1, 10_000, 8):
        wrapped.zero_grad()
        wrapped(torch.full((1, 3), rank + 1.0)).sum().backward()
        assert wrapped.module.weight.grad.eq(1.5).all()
        kept[-1].resize_(size).fill_(7)
        if not views:
            assert wrapped.module.weight.grad.eq(1.5).all()
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
    """Calls `child` in a forked process and returns its exit status."""
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
def test_using_the_wrapper_in_a_fork_is_an_error(rank):
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


# Both ranks train; rank 1 also runs TEST_LINE.
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


# A process group's thread that works without the GIL, then releases Python objects.
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

# Work in flight when rank 1's interpreter exits: source code, exit code.
EXITS = {
    "a busy thread of a group": (_BUSY_THREAD, 0),
    "an exit in a hook": ("state[0] = lambda: sys.exit(5); step()", 5),
}


@pytest.mark.parametrize("name", quick(EXITS, ["an exit in a hook"]))
def test_an_interpreter_may_exit_with_work_in_flight(name, tmp_path):
    source, code = EXITS[name]
    processes = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "TEST_LINE": source,
            "TEST_STORE": str(tmp_path / "store"),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONFAULTHANDLER": "1",
        }
        with open(tmp_path / f"output_{rank}", "wb") as output:
            command = [sys.executable, "-c", _PROGRAM]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    try:
        ended = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    outputs = [(tmp_path / f"output_{rank}").read_text(errors="replace") for rank in range(2)]
    assert ended == [1, code] and "Error" in outputs[0], (ended, outputs)
