"""torchft's process groups and its DistributedDataParallel with brigade's reducer."""

import importlib.util
import sys
import weakref
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from exact_training import MODES
from ranks import on_ranks, run_ranks
from training import CLASSES

HAS_TORCHFT = importlib.util.find_spec("torchft") is not None
pytestmark = pytest.mark.skipif(not HAS_TORCHFT, reason="torchft is not installed")


def _connect(groups, rank, world_size, name):
    """Returns a torchft group over Gloo, and the objects that it needs alive."""
    port = [None]
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port)
    address = f"127.0.0.1:{port[0]}/{name}"
    group = groups.ProcessGroupGloo()
    if hasattr(groups, "reconfigure_with_store"):
        groups.reconfigure_with_store(group, address, rank, world_size)
    else:  # until torchft 0.2.0
        group.configure(address, f"replica_{rank}", rank, world_size)
    return group, store


def _manager(group):
    """Returns a mock with the methods of torchft's manager that its classes call."""
    manager = MagicMock()
    manager._pg = group
    manager.num_participants.return_value = group.size()

    def allreduce(tensor, reduce_op=dist.ReduceOp.SUM, **others):
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        return group.allreduce([tensor], options)

    manager.allreduce.side_effect = allreduce
    return manager


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CLASSES)
@on_ranks(1, timeout_s=20, deadline_s=60)
def test_its_dummy_group(rank, kind, mode):
    from torchft import process_group as groups

    group = groups.ProcessGroupDummy(0, 1)
    wrapped = CLASSES[kind](nn.Linear(3, 2), process_group=group, **MODES[mode])
    for _ in range(4):
        wrapped.zero_grad()
        wrapped(torch.ones(4, 3)).sum().backward()
        assert torch.equal(wrapped.module.weight.grad, torch.full((2, 3), 4.0))
        assert torch.equal(wrapped.module.bias.grad, torch.full((2,), 4.0))


class _Work:
    def __init__(self, work):
        from torchft.manager import _ManagedFuture

        self._future = _ManagedFuture(weakref.ref(self))
        self._future._fut = work.get_future().then(self._average)

    @staticmethod
    def _average(done):
        return done.value()[0] / dist.get_world_size()

    def wait(self):
        return True

    def get_future(self):
        return self._future


def _its_class(rank, installs):
    if installs == "before_import":
        brigade.install()
    assert "torchft.ddp" not in sys.modules
    from torchft import process_group as groups
    from torchft.ddp import DistributedDataParallel

    if installs == "after_import":
        brigade.install()
    group, store = _connect(groups, rank, dist.get_world_size(), "ddp")
    manager = _manager(group)
    plain = manager.allreduce.side_effect
    manager.allreduce.side_effect = lambda tensor: _Work(plain(tensor))
    wrapped = DistributedDataParallel(manager, nn.Linear(3, 2))
    for step in range(4):
        wrapped.zero_grad()
        xs = [4.0 * (step + 1) + 16 * r for r in range(dist.get_world_size())]
        wrapped(torch.full((1, 3), xs[rank])).sum().backward()
        average = sum(xs) / len(xs)
        assert torch.equal(wrapped.module.weight.grad, torch.full((2, 3), average))
    reducer = type(wrapped.reducer).__module__
    dist.barrier()
    del store
    return reducer


@pytest.mark.parametrize("installs", ["never", "before_import", "after_import"])
def test_its_class(installs):
    reducers = run_ranks(_its_class, installs, timeout_s=20, deadline_s=60)
    assert all(name.startswith("torch" if installs == "never" else "brigade") for name in reducers)
