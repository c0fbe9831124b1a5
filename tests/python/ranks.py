"""Runs a function on several ranks, each in its own process, over Gloo on loopback.

Later calls reuse the processes, unless a call has changed a process's state (rank_state.py).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Callable, Collection
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

_DEADLINE_S = 300
# Ranks are forked from a process that has imported torch and has no other threads.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preloaded"])


@dataclasses.dataclass
class _Call:
    """Set-up of a call. Its function and arguments are sent separately."""

    rank: int
    world_size: int
    backend: str
    store: str
    timeout_s: float


@dataclasses.dataclass
class _Answer:
    """Result of a call.

    Attributes:
        value: The function's result, or the traceback of its error.
        left: A change of the process's state, which prevents its reuse; None if there is none.
    """

    ok: bool
    value: Any
    left: str | None


_DIED = _Answer(False, "died without an answer", "death")
_LATE = _Answer(False, "gave no answer before the deadline", "lateness")


class _Process:
    """A process that runs calls until one changes its state."""

    def __init__(self) -> None:
        self._pipe, far = _CONTEXT.Pipe()
        self._process: ForkServerProcess = _CONTEXT.Process(target=_serve, args=(far,))
        self._process.start()
        far.close()

    def send(self, call: _Call, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died
            self._pipe.send(call)
            self._pipe.send((function, args))

    def answer(self, deadline: float) -> _Answer:
        if not wait([self._pipe], timeout=max(0.0, deadline - time.monotonic())):
            return _LATE
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return _DIED

    def end(self, timeout_s: float) -> int | None:
        """Ends the process, by SIGKILL after `timeout_s`, and returns its exit code."""
        self._pipe.close()
        self._process.join(timeout_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


_idle: list[_Process] = []


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.pop().end(timeout_s=0)


@functools.cache
def _start_forkserver() -> None:
    """Starts the process from which ranks are forked. It imports from PYTHONPATH only."""
    folder = os.path.dirname(os.path.abspath(__file__))
    with unittest.mock.patch.dict(os.environ):
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        forkserver.ensure_running()


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    backend: str = "gloo",
    timeout_s: float = 120,
    deadline_s: float = _DEADLINE_S,
    may_die: Collection[int] = (),
    fresh: bool = False,
) -> list[Any]:
    """Calls ``function(rank, *args)`` on each rank of a group.

    Args:
        function: A module's function, which other processes can import. May destroy the group.
        backend: Of the group. "nccl" needs a GPU per rank.
        timeout_s: Of the group.
        deadline_s: For all ranks together; a rank without a result is then killed.
        may_die: Ranks that may exit without a result.
        fresh: Uses new processes, in which brigade has not yet replaced any function of torch.

    Returns:
        The results by rank; for a rank that died, its exit code.

    Raises:
        AssertionError: A rank raised, died or missed the deadline; with its traceback.
    """
    _start_forkserver()
    processes: list[_Process] = []
    answers: list[_Answer] = []
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        deadline = time.monotonic() + deadline_s
        try:
            for rank in range(world_size):
                processes.append(_idle.pop() if _idle and not fresh else _Process())
                call = _Call(rank, world_size, backend, store, timeout_s)
                processes[-1].send(call, function, args)
            answers += [process.answer(deadline) for process in processes]
        finally:
            is_late = any(answer is _LATE for answer in answers) or len(answers) < world_size
            codes = _put_back(processes, answers, 0 if is_late else 10, fresh)
    failures = []
    for rank, answer in enumerate(answers):
        if answer is _DIED and rank in may_die:
            answers[rank] = _Answer(True, codes[rank], None)
        elif not answer.ok:
            code = f", exit code {codes[rank]}" if answer is _DIED else ""
            failures.append(f"rank {rank}:\n{answer.value}{code}")
    if failures:
        raise AssertionError("\n".join(failures))
    return [answer.value for answer in answers]


def torchrun(*command: Any, world_size: int = 2, **options: Any) -> str:
    """Runs a program under torchrun and returns its output.

    Args:
        command: The program and its arguments.
        options: Of subprocess.run().
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    done = subprocess.run(
        [sys.executable, *launcher, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        **options,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def on_ranks(world_size: int = 2, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Decorator: turns function(rank, ...) into a pytest test that calls it on each rank.

    The test has the parameters after `rank`. A parameter `world_size` sets the number of ranks.

    Args:
        options: Of run_ranks().
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**given: Any) -> None:
            size = given.get("world_size", world_size)
            where = function.__module__, function.__name__
            run_ranks(_call_test, *where, given, world_size=size, **options)

        of_rank = list(inspect.signature(function).parameters.values())
        test.__signature__ = inspect.Signature(of_rank[1:])  # type: ignore[attr-defined]
        return test

    return decorate


def _call_test(rank: int, module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(rank, **given)


def _put_back(
    processes: list[_Process], answers: list[_Answer], timeout_s: float, fresh: bool
) -> dict[int, int | None]:
    """Keeps the reusable processes; ends the others and returns their exit codes by rank."""
    died = any(answer in (_DIED, _LATE) for answer in answers)
    codes = {}
    for rank, process in enumerate(processes):
        if rank >= len(answers) or died or fresh or answers[rank].left:
            codes[rank] = process.end(timeout_s)
        else:
            _idle.append(process)
    return codes


def _serve(pipe: Connection) -> None:
    """Runs calls until one fails or changes the process's state."""
    if "preloaded" not in sys.modules:
        raise ImportError("the fork server has not imported preloaded.py")
    import torch

    from rank_state import RankState

    faulthandler.enable()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    state = RankState()
    answer = None
    while answer is None or answer.left is None:
        try:
            call = pipe.recv()
        except EOFError:
            return  # the parent has closed the pipe
        try:
            function, args = pipe.recv()
            state.begin_call()
            value, has_group = _run(call, function, args)
            del args
            left = state.difference() if has_group else "no process group"
            answer = _Answer(True, value, left)
        except BaseException:
            answer = _Answer(False, traceback.format_exc(), "an error")
        pipe.send(answer)


def _run(call: _Call, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, bool]:
    """Returns the function's result, and whether the process group still exists."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        call.backend,
        init_method=f"file://{call.store}",
        rank=call.rank,
        world_size=call.world_size,
        timeout=datetime.timedelta(seconds=call.timeout_s),
        device_id=torch.device("cuda", call.rank) if call.backend == "nccl" else None,
    )
    value = function(call.rank, *args)
    if not dist.is_initialized():
        return value, False
    dist.barrier()  # a peer may still be receiving from this rank
    dist.destroy_process_group()
    return value, True
