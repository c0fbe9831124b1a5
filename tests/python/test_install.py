"""brigade.install(): torch's classes construct brigade's, and remain torch's."""

import copy
import functools
import pickle
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel

import brigade

from ranks import on_ranks, run_ranks

OWNERS = (
    DistributedDataParallel,
    torch.distributed.fsdp,
    nn.parallel,
    nn.parallel.distributed,
)


def _net():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def _is_ours(wrapped):
    assert isinstance(wrapped, DistributedDataParallel)
    return isinstance(wrapped, brigade.DistributedDataParallel) and isinstance(
        wrapped.reducer, brigade.Reducer
    )


def _is_torchs(wrapped):
    assert isinstance(wrapped, DistributedDataParallel)
    return not isinstance(wrapped, brigade.DistributedDataParallel) and isinstance(
        wrapped.reducer, dist.Reducer
    )


def _trains(wrapped, rank):
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.full((1, 3), 2.0 * rank)).sum().backward()
        assert wrapped.module.weight.grad.tolist() == [[1.0] * 3] * 2


# ---------------------------------------------------------------- construction


@on_ranks()
def test_torchs_class_constructs_brigades_until_uninstall(rank):
    before = [dict(vars(owner)) for owner in OWNERS]
    with brigade.install():
        ours = nn.parallel.DistributedDataParallel(_net())
        assert _is_ours(ours)
        assert repr(type(ours)) == repr(brigade.DistributedDataParallel)
        _trains(ours, rank)
    assert [dict(vars(owner)) for owner in OWNERS] == before
    theirs = nn.parallel.DistributedDataParallel(_net())
    assert _is_torchs(theirs)
    _trains(theirs, rank)
    _trains(ours, rank)


# ------------------------------------------------------- names bound earlier


class Derived(DistributedDataParallel):
    def __init__(self, module, **options):
        self.set_before = 1
        super().__init__(module, **options)

    def forward(self, x):
        return 2 * super().forward(x)


class DerivedInOldStyle(DistributedDataParallel):
    def __init__(self, module):
        DistributedDataParallel.__init__(self, module)

    def forward(self, x):
        return 2 * DistributedDataParallel.forward(self, x)


@on_ranks()
def test_subclasses_of_torchs_class_keep_their_methods_with_brigades_reducer(rank):
    for kind in (Derived, DerivedInOldStyle):
        with brigade.install():
            ours = kind(_net())
        theirs = kind(_net())
        assert _is_ours(ours)
        assert _is_torchs(theirs)
        assert isinstance(ours, kind)
        assert repr(type(ours)) == repr(kind)
        for wrapped in (ours, theirs):
            assert wrapped.__dict__.get("set_before", 1) == 1
            wrapped(torch.full((1, 3), 2.0 * rank)).sum().backward()
            assert wrapped.module.weight.grad.tolist() == [[2.0] * 3] * 2


@on_ranks(1)
def test_modules_imported_while_installed_have_torchs_classes_afterwards(rank):
    with brigade.install():
        library = types.ModuleType("library")
        exec(
            "from torch.nn.parallel import DistributedDataParallel as DDP\n"
            "class Derived(DDP): pass\n"
            "def make(module, kind=DDP): return kind(module)\n",
            vars(library),
        )
        for ours in (library.make(_net()), library.Derived(_net())):
            assert _is_ours(ours)
            assert set(get_model_state_dict(ours)) == {"weight", "bias"}
    assert library.DDP is DistributedDataParallel
    assert set(get_model_state_dict(ours)) == {"weight", "bias"}
    for theirs in (library.make(_net()), library.Derived(_net())):
        assert _is_torchs(theirs)
        assert set(get_model_state_dict(theirs)) == {"weight", "bias"}


# ------------------------------------------------------------ living instances


def _joins(wrapped, rank):
    """Checks join(): rank 1 has twice the data; the mean is over the remaining ranks."""
    with wrapped.join():
        for _ in range(1 + rank):
            wrapped.zero_grad()
            wrapped(torch.full((1, 3), 2.0)).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[2.0 if rank == 0 else 1.0] * 3] * 2


def _sum_halved(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / 2)


@on_ranks(fresh=True)
def test_instances_survive_install_and_uninstall(rank):
    early = DistributedDataParallel(_net())
    brigade.install()
    ours = DistributedDataParallel(_net())
    for _ in range(2):
        assert _is_torchs(early)
        assert _is_ours(ours)
        for wrapped in (early, ours):
            _joins(wrapped, rank)
            _trains(wrapped, rank)
            assert set(get_model_state_dict(wrapped)) == {"weight", "bias"}
            assert pickle.dumps(wrapped)
            wrapped.register_comm_hook(None, _sum_halved)
            _trains(wrapped, rank)
        brigade.uninstall()
        early, ours = copy.deepcopy(early), copy.deepcopy(ours)


# --------------------------------------------------------------------- pickles


@on_ranks(1)
def test_a_pickle_of_an_older_torchs_wrapper_loads(rank):
    wrapped = DistributedDataParallel(_net(), broadcast_buffers=False)
    state = wrapped.__getstate__()
    for name in (
        "forward_sync_buffers",
        "lazy_bucket_allocation",
        "batched_grad_copy",
        "_require_manual_backward_finalization",
    ):
        state.pop(name, None)
    state["broadcast_buffers"] = False
    again = brigade.DistributedDataParallel.__new__(brigade.DistributedDataParallel)
    again.__setstate__(state)
    assert again.forward_sync_buffers is again.broadcast_buffers is False
    again(torch.ones(1, 3)).sum().backward()
    assert again.module.weight.grad.tolist() == [[1.0] * 3] * 2


@on_ranks(1)
def test_pickles_name_the_class_that_the_program_named(rank):
    theirs = {kind: pickle.dumps(kind(_net())) for kind in (DistributedDataParallel, Derived)}
    with brigade.install():
        ours = {kind: pickle.dumps(kind(_net())) for kind in theirs}
        for kind in theirs:
            for pickled in (theirs[kind], ours[kind]):
                again = pickle.loads(pickled)
                assert _is_ours(again)
                assert isinstance(again, kind)
    for kind in theirs:
        for pickled in (theirs[kind], ours[kind]):
            again = pickle.loads(pickled)
            assert _is_torchs(again)
            assert type(again) is kind


# A program without brigade that loads a pickled model.
_READER = """
import sys
sys.modules["brigade"] = None  # importing it fails
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
wrapped = torch.load(sys.argv[1], weights_only=False)
wrapped(torch.ones(1, 3)).sum().backward()
assert type(wrapped) is torch.nn.parallel.DistributedDataParallel
assert wrapped.module.weight.grad.tolist() == [[1.0] * 3] * 2
"""


def _saves(rank, path):
    with brigade.install():
        wrapped = DistributedDataParallel(_net(), find_unused_parameters=True)
        wrapped(torch.ones(1, 3)).sum().backward()
        torch.save(wrapped, path)


def test_a_pickled_model_loads_without_brigade(tmp_path):
    path = tmp_path / "model.pt"
    run_ranks(_saves, str(path), world_size=1)
    subprocess.run([sys.executable, "-c", _READER, str(path)], check=True, timeout=300)


# ----------------------------------------------------------------- in and out


@on_ranks(1)
def test_only_the_outer_context_uninstalls(rank):
    with brigade.install():
        with brigade.install():
            pass
        assert _is_ours(DistributedDataParallel(_net()))
    assert _is_torchs(DistributedDataParallel(_net()))


@on_ranks(1)
def test_uninstall_keeps_patches_of_others_around_ours(rank):
    torchs = DistributedDataParallel.__init__
    brigade.install()
    ours = DistributedDataParallel.__init__
    seen = []

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        seen.append(type(self).__name__)
        ours(self, *args, **kwargs)

    DistributedDataParallel.__init__ = theirs
    assert _is_ours(DistributedDataParallel(_net()))
    brigade.uninstall()
    assert DistributedDataParallel.__init__ is theirs
    assert _is_torchs(DistributedDataParallel(_net()))
    assert len(seen) == 2
    DistributedDataParallel.__init__ = ours  # the function that they wrapped
    assert _is_torchs(DistributedDataParallel(_net()))
    DistributedDataParallel.__init__ = torchs


@on_ranks(fresh=True)
def test_fully_shard_is_brigades(rank):
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import fully_shard as before

    stays = before(torch.nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="already imported as 'test_install.bound_before'"):
        sys.modules[__name__].bound_before = before
        installed = brigade.install()
    del sys.modules[__name__].bound_before
    with installed:
        from torch.distributed._composable.fsdp import fully_shard as composable
        from torch.distributed.fsdp import fully_shard

        ours = fully_shard(torch.nn.Linear(2, 2))
        assert isinstance(ours, brigade.FSDPModule)
        for module in (ours, stays, torch.nn.Linear(2, 2)):
            module.twice = types.MethodType(lambda self, x: 2 * (x @ self.weight), module)
            torch.distributed.fsdp.register_fsdp_forward_method(module, "twice")
            assert module.twice(torch.ones(2)).shape == (2,)
        is_sharded = [fully_shard.state(each) is not None for each in (ours, stays, module)]
        assert is_sharded == [True, True, False]
        assert isinstance(composable(torch.nn.Linear(2, 2)), brigade.FSDPModule)
        above = fully_shard(torch.nn.Sequential(stays, torch.nn.Linear(2, 2)))
        assert isinstance(above, FSDPModule) and not isinstance(above, brigade.FSDPModule)
        on_meta, of_devices = torch.nn.Linear(2, 2, device="meta"), mock.Mock(device_type="xpu")
        with (
            mock.patch.dict("brigade._install._torchs", fully_shard=lambda *_, **__: "torch's"),
            pytest.warns(UserWarning, match="fully_shard on 'xpu' devices is torch's"),
        ):
            assert fully_shard(on_meta, mesh=of_devices) == "torch's"
        assert isinstance(fully_shard(on_meta), brigade.FSDPModule)
        with pytest.raises(NotImplementedError, match="offload_policy"):
            fully_shard(torch.nn.Linear(2, 2), offload_policy=CPUOffloadPolicy(pin_memory=False))
    from torch.distributed.fsdp import fully_shard

    assert fully_shard is before
