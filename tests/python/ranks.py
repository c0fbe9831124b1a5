"""Runs a function on several ranks, each in a process of its own, over Gloo on loopback.

With `BRIGADE_TEST_DEVICE=cuda` in the environment their tensors lie on that device, all ranks'
on the same one (tests/python/on_device.py).
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Callable, Collection
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

_DEADLINE_S = 300
_DIED = (False, "died without an answer")
_LATE = (False, "gave no answer before the deadline")
# Processes are forked from one that has imported torch and started no thread.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preloaded"])


def _start_forkserver() -> None:
    """Starts the process that ranks are forked from; it looks for modules in PYTHONPATH alone."""
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
) -> list[Any]:
    """Calls ``function(rank, *args)`` on each rank of a group.

    Args:
        function: Of a module, so that another process finds it. May destroy the group.
        backend: Of the group; with "nccl" each rank needs a GPU of its own.
        timeout_s: Of the group.
        deadline_s: Of all ranks together: one that has not answered then is killed.
        may_die: Ranks that may end without an answer.

    Returns:
        What each rank returned, by rank; the exit code of one that died.

    Raises:
        AssertionError: A rank raised, died or took too long; with its traceback.
    """
    _start_forkserver()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_run_rank,
                args=(rank, world_size, backend, store, sender, timeout_s, function, args),
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        answers: list[tuple[bool, Any]] = []
        deadline = time.monotonic() + deadline_s
        try:
            answers += [_answer(pipe, deadline) for pipe in pipes]
        finally:
            late = any(answer == _LATE for answer in answers)
            for process in processes:
                process.join(timeout=0 if late else 10)
                if process.is_alive():
                    process.kill()
                    process.join()
    for rank, process in enumerate(processes):
        if answers[rank] == _DIED:
            died = f"{_DIED[1]}, exit code {process.exitcode}"
            answers[rank] = (True, process.exitcode) if rank in may_die else (False, died)
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
    if failures:
        raise AssertionError("\n".join(failures))
    return [value for _, value in answers]


def _answer(pipe: Connection, deadline: float) -> tuple[bool, Any]:
    if not wait([pipe], timeout=max(0.0, deadline - time.monotonic())):
        return _LATE
    try:
        return pipe.recv()
    except EOFError:
        return _DIED


def _run_rank(
    rank: int,
    world_size: int,
    backend: str,
    store: str,
    sender: Connection,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import on_device
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        if "preloaded" not in sys.modules:
            raise ImportError("the process that ranks are forked from lacks preloaded.py")
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=torch.device("cuda", rank) if backend == "nccl" else None,
        )
        with on_device.tensors_on(os.environ.get("BRIGADE_TEST_DEVICE", "cpu")):
            value = function(rank, *args)
        if dist.is_initialized():
            dist.barrier()  # a peer may still want what this rank has to send
            dist.destroy_process_group()
        sender.send((True, value))
    except BaseException:
        sender.send((False, traceback.format_exc()))
