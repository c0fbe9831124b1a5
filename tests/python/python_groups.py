"""Process groups written in Python over Gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor]


def _inner_future(work: dist.Work, tensors: Tensors) -> torch.futures.Future:
    return work.get_future()


def _holding(value_of: Callable[[list[torch.Tensor]], Any]) -> Callable[..., Any]:
    """Returns a function that makes a Python future of this value, completed by the inner one."""

    def future_of(work: dist.Work, tensors: Tensors) -> torch.futures.Future:
        future = torch.futures.Future()
        value = value_of(list(tensors))
        work.get_future().add_done_callback(lambda done: future.set_result(value))
        return future

    return future_of


def _continued(work: dist.Work, tensors: Tensors) -> torch.futures.Future:
    return work.get_future().then(lambda done: done.value())


# Kinds of futures of an all-reduce.
FUTURES = {
    "inner": _inner_future,
    "list": _holding(lambda tensors: tensors),
    "tuple": _holding(tuple),
    "tensor": _holding(lambda tensors: tensors[0]),
    "continued": _continued,
}


class WorkInPython(dist._Work):
    """Another work with a future that holds Python objects."""

    def __init__(
        self, inner: dist.Work, future: torch.futures.Future, on_wait: Callable[[], None]
    ) -> None:
        super().__init__()
        self._inner = inner
        self._future = future
        self._on_wait = on_wait

    def wait(self, timeout: Any = None) -> bool:
        self._on_wait()
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future:
        return self._future


class GroupInPython(dist.ProcessGroup):
    """A group that overrides the methods that frameworks' Python groups override.

    Args:
        inner: Moves the data.
        future: A key of FUTURES.
    """

    def __init__(self, inner: dist.ProcessGroup, future: str) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._future_of = FUTURES[future]
        self.num_reduced = 0
        self.num_waited = 0

    def _count_wait(self) -> None:
        self.num_waited += 1

    def _work(self, inner: dist.Work, tensors: Tensors) -> WorkInPython:
        return WorkInPython(inner, self._future_of(inner, tensors), self._count_wait)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        self.num_reduced += 1
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._work(self._inner.allreduce(tensors, opts), tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self._work(self._inner.broadcast(tensors, opts), tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        return self._work(self._inner.allgather(outputs, inputs, opts), outputs[0])

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = dist.BarrierOptions() if opts is None else opts
        return self._inner.barrier(opts)

    def getBackendName(self) -> str:
        return "in_python"
