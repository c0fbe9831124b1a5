"""Programs of users that ended wrong or silently once; each docstring says the right result.

Other tests make the assertions of these programs:

    09_wrapped_module_called_by_itself: test_wrapper_bypassed.py
    11_python_reducer_comm_hook: test_compiled.py,
        a_comm_hook_of_a_compiled_backward_has_torchs_bits
    sharded/04_clip_norm_of_two_models: test_sharded_reductions.py, a_norm_covers_two_roots
    sharded/06_scalar_part_outside_forward: test_parts_outside_forward.py,
        a_loss_may_use_parameters_of_the_outermost_unit
    sharded/13_while_whole_by_hand, loading: test_fsdp2_state.py,
        a_state_dict_loads_while_parameters_are_unsharded
    cpp/01_hook_throws_after_launch: sharded_scenarios_test.cc, HookAfterLaunchIn*
    cpp/02_then_collective_example: comm_hooks_test.cc, the example of then_collective()
    cpp/03_reduction_hook_state: fully_shard_test.cc, HooksGetTheirUnit
    cpp/04_silent_module_parameters: fully_shard_test.cc, EveryStrategyTrainsAndEvaluates,
        NormsAndClippingAreGlobal, WritesCountIfTheirScopeEndsWithoutAnError
    cpp/05_texts: fully_shard_test.cc, ErrorsNameTheMistake (options);
        comm_hook_contract_test.cc, UnnamedHooksOfDifferentTypesAreAnError (unnamed)
"""

import contextlib
import copy
import dataclasses
import functools
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import clip_grad_norm_

import brigade

from cases import quick
from ranks import on_ranks, run_ranks
from sharded_training import expect_same, full_optimizer_state
from whole_numbers import backward_of_all, batch_of, expect_gradients, layers, loss_of, step_by_sign


def _nets(*sizes):
    """Returns an unsharded net, and an equal one whose first layer and root are units."""
    plain, net = layers(*sizes), layers(*sizes)
    brigade.fully_shard(net[0])
    return plain, brigade.fully_shard(net)


def _backward(plain, net, rank, step=0):
    size = plain[0].in_features
    backward_of_all(plain, 2, lambda model, r: loss_of(model, batch_of(size, r, step)))
    loss_of(net, batch_of(size, rank, step)).backward()


def _expect_training(plain, net, rank):
    for step in range(2):
        _backward(plain, net, rank, step)
        expect_gradients(net, plain)
        step_by_sign(plain, net)


def _expect_moves(net, optimizer, rank, before):
    """Runs three steps, in which all parameters change."""
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, batch_of(net[0].in_features, rank, step)).backward()
        optimizer.step()
    for name, value in net.full_state_dict().items():
        assert not torch.equal(value, before[name]), name


# ---- Checkpoints.

_PROCESS = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
_SAVES = {
    "in a thread": lambda state, **to: dcp.async_save(state, **to).result(),
    "in a process": lambda state, **to: dcp.async_save(state, **to, **_PROCESS).result(),
    "at once": dcp.save,
}


@pytest.mark.parametrize("way", quick(_SAVES, ["in a thread", "at once"]))
@on_ranks()
def test_a_writer_gets_the_shards_of_all_ranks(rank, way, tmp_path):
    """The checkpoint has the unsharded tensors; another process may not be supported.

    01_async_save_loses_parts, sharded/03_async_save_by_process.
    """
    net = brigade.fully_shard(nn.Linear(5, 64))
    save = functools.partial(
        _SAVES[way], {"m": net.state_dict()}, storage_writer=dcp.FileSystemWriter(tmp_path)
    )
    if way == "in a process":
        with pytest.raises(NotImplementedError, match="can't be pickled"):
            save()
        return
    save()
    dist.barrier()
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert tuple(saved["m.weight"].size) == (64, 5)
    read = {"m": nn.Linear(5, 64).state_dict()}
    dcp.load(read, checkpoint_id=tmp_path)
    expect_same(read["m"], net.full_state_dict())


@pytest.mark.parametrize("how", ["assign", "copy"])
@on_ranks()
def test_states_are_distributed_by_mesh_and_placements(rank, how):
    """A model on meta gets the distributed tensors' values, as torchtitan and accelerate load.

    sharded/09_load_by_mesh_and_placements.
    """
    full = layers(4, 4)[0].state_dict()
    with torch.device("meta" if how == "assign" else "cpu"):
        net = brigade.fully_shard(nn.Linear(4, 4, dtype=torch.float64))
    given = {
        name: nn.Parameter(distribute_tensor(full[name], p.device_mesh, p.placements))
        for name, p in net.state_dict().items()
    }
    net.load_state_dict(given, assign=how == "assign")
    for name, value in full.items():
        assert torch.equal(net.get_parameter(name).full_tensor(), value), name


_RESUMED = {
    "AdamW": [
        {},
        {"betas": (0.9, 0.999)},
        {"lr": 0.1},
        {"eps": 1e-2},
        {"maximize": True},
        {"weight_decay": 0.5},
    ],
    "SGD": [{"momentum": 0.5}],
}


@pytest.mark.parametrize("kind", ["whole", "shards"])
@on_ranks()
def test_resuming_with_other_options_is_reported(rank, kind, tmp_path):
    """Training continues as saved, or a warning or error names the options that differ.

    10_resumed_with_other_options.
    """
    save, load = {
        "whole": (brigade.save_whole, brigade.load_whole),
        "shards": (brigade.save_shards, brigade.load_shards),
    }[kind]
    base = {
        "AdamW": {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1},
        "SGD": {"lr": 0.01, "momentum": 0.9},
    }

    def make(name, options):
        net = brigade.fully_shard(layers(5, 3))
        return net, getattr(torch.optim, name)(net.parameters(), **base[name] | options)

    def train(net, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(net, batch_of(5, rank, step)).backward()
            optimizer.step()

    for name, cases in _RESUMED.items():
        kept, first = make(name, {})
        train(kept, first, range(2))
        save(kept, tmp_path / name, first)
        train(kept, first, range(2, 4))
        for options in cases:
            net, optimizer = make(name, options)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                load(net, tmp_path / name, optimizer)
            train(net, optimizer, range(2, 4))
            assert torch.equal(net[0].weight.full_tensor(), kept[0].weight.full_tensor()), options
            assert all(any(o in str(w.message) for w in warned) for o in options), options


# ---- Before the first forward.


@pytest.mark.parametrize("call", ["full state", "norm"])
@on_ranks()
def test_optimizer_states_are_read_before_the_first_forward(rank, call):
    """The model trains; its root is the outermost module.

    02_norm_before_forward_spoils_the_model; test_fsdp2_behaviours.py reads parameters.
    """
    plain, net = _nets(6, 6, 6)
    optimizer = torch.optim.Adagrad(net.parameters(), 0.1)  # has its state at once
    if call == "norm":
        assert optimizer.state[net[0].weight]["sum"].norm() == 0
    else:
        assert full_optimizer_state(net, optimizer)["state"]["0.weight"]["sum"].shape == (6, 6)
    _expect_training(plain, net, rank)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adadelta", "Adagrad"])
@on_ranks()
def test_an_optimizer_made_before_sharding_trains_or_raises(rank, name):
    """All parameters move, or the step is an error (08_optimizer_made_before_sharding)."""
    net = layers(5, 5, 5)
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.1)
    before = copy.deepcopy(net.state_dict())
    brigade.fully_shard(net[0])
    brigade.fully_shard(net)
    if name == "Adagrad":  # has unsharded state
        loss_of(net, batch_of(5, rank, 0)).backward()
        with pytest.raises(NotImplementedError, match="sharded tensor"):
            optimizer.step()
        return
    _expect_moves(net, optimizer, rank, before)


# ---- While units are unsharded.


@pytest.mark.parametrize("how", ["whole_parameters", "unshard", "unshard an inner unit"])
@on_ranks()
def test_an_optimizer_made_of_unsharded_parameters_trains(rank, how):
    """All parameters train, or an error is raised.

    03_optimizer_made_of_whole_parameters, sharded/13_while_whole_by_hand.
    """
    _, net = _nets(6, 6, 6)
    before = net.full_state_dict()
    unsharded = net[0] if how == "unshard an inner unit" else net
    with net.whole_parameters() if how == "whole_parameters" else contextlib.nullcontext():
        if how != "whole_parameters":
            unsharded.unshard()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
    if how != "whole_parameters":
        unsharded.reshard()
    _expect_moves(net, optimizer, rank, before)


@pytest.mark.parametrize("unsharded", ["root", "inner unit"])
@on_ranks()
def test_norms_of_gradients_while_units_are_unsharded(rank, unsharded):
    """The norm is that of one process (sharded/13_while_whole_by_hand)."""
    plain, net = _nets(4, 4, 2)
    _backward(plain, net, rank)
    (net if unsharded == "root" else net[0]).unshard()
    expected = clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(clip_grad_norm_(net.parameters(), 1e9), expected)


# ---- Operators, shapes, arguments.

_OF_TWO = {
    "max": torch.max,
    "min": torch.min,
    "maximum": torch.maximum,
    "fmax": torch.fmax,
    "resolve_conj": lambda a, b: a.resolve_conj(),
    "resolve_neg": lambda a, b: a.resolve_neg(),
    "clamp": lambda a, b: torch.clamp(a, min=b),
}
_OF_INDICES = [torch.where, torch.nonzero, torch.argwhere]


@on_ranks()
def test_elementwise_operators_give_shards_and_indices_are_errors(rank):
    """Results are shards, so that norms cover all ranks; where(condition) is an error.

    06_max_of_two_parts.
    """
    plain, net = _nets(5, 3)
    _backward(plain, net, rank)
    for name, of in _OF_TWO.items():
        expected, found = (of(p.grad, 2 * p.grad) for p in (plain[0].weight, net[0].weight))
        torch.testing.assert_close(found.norm(), expected.norm(), msg=name)
    for of in _OF_INDICES:
        with pytest.raises(NotImplementedError):
            of(net[0].weight.detach() > 0)


@on_ranks()
def test_parameters_have_unsharded_shapes(rank):
    """Counts, fan-in and weight decay by shape are as in one process (07_shapes_of_parts)."""
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2), nn.Conv2d(2, 2, 1))
    brigade.fully_shard(net)
    found = list(net.parameters())
    assert sum(p.numel() for p in found) == sum(p.nelement() for p in found) == 90 + 6
    assert sum(len(p.shape) > 1 for p in found) == sum(p.ndim > 1 for p in found) == 3
    assert (found[0].shape[-1], found[0].size(0), len(found[0])) == (6, 8, 8)
    assert nn.init._calculate_fan_in_and_fan_out(found[0]) == (6, 8)


class _Auxiliary(nn.Module):
    """Adds an auxiliary loss to a container that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, losses):
        loss = x.float().square().mean()
        if isinstance(losses, list):
            losses.append(loss)
        elif isinstance(losses, dict):
            losses[len(losses)] = loss
        else:
            losses.found.append(loss)
        return self.linear(x)


@dataclasses.dataclass
class _Losses:
    found: list


class _WithAuxiliaries(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(3, 3), nn.ModuleList([_Auxiliary(), _Auxiliary()])
        self.make = make

    def forward(self, x):
        losses = self.make()
        x = self.first(x)
        for block in self.blocks:
            x = block(x, losses)
        return x, losses


# Functions that make a container, and that return its elements.
_CONTAINERS = {
    "list": (list, list),
    "dict": (dict, lambda losses: list(losses.values())),
    "dataclass": (lambda: _Losses([]), lambda losses: losses.found),
}


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("kind", _CONTAINERS)
@on_ranks()
def test_units_append_to_containers_of_their_caller(rank, kind, casts):
    """The caller finds an entry of each block (sharded/08_list_that_a_unit_appends_to)."""
    make, elements_of = _CONTAINERS[kind]
    plain = _WithAuxiliaries(make)
    model = copy.deepcopy(plain)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if casts else None)
    for module in (*model.blocks, model):
        brigade.fully_shard(module, mp_policy=policy)
    for net in (plain, model):
        out, losses = net(torch.ones(2, 3))
        assert len(elements_of(losses)) == 2
        (out.sum() + sum(elements_of(losses))).backward()
    if not casts:
        expect_gradients(model, plain)


@pytest.mark.parametrize("make", [nn.ReLU, nn.Dropout, nn.Flatten])
@on_ranks()
def test_modules_without_parameters_may_be_roots(rank, make):
    """A loop shards all children; the model trains (sharded/05_no_parameters)."""
    plain = nn.Sequential(*layers(3, 3), make(), *layers(3, 2)).eval()
    net = copy.deepcopy(plain)
    for child in net.children():
        brigade.fully_shard(child)
    _backward(plain, net, rank)
    expect_gradients(net, plain)


# ---- Data parallelism.


@pytest.mark.parametrize(
    "wrapper", [brigade.DistributedDataParallel, nn.parallel.DistributedDataParallel]
)
@on_ranks()
def test_wrapping_a_module_with_shards_is_an_error(rank, wrapper):
    """An error, so that no rank's shard overwrites another's (04_ddp_around_a_sharded_unit)."""
    plain, net = layers(4, 4, 4), layers(4, 4, 4)
    brigade.fully_shard(net[1])
    with pytest.raises((NotImplementedError, RuntimeError, TypeError, ValueError)):
        wrapper(net)
    assert torch.equal(net[1].weight.full_tensor(), plain[1].weight)


# ---- Threads.


def _serves_while_training(rank, is_warm):
    """Trains while another thread runs forwards; returns the errors' texts."""
    net = layers(6, 6, 6, 6)
    for module in (*net, net):
        brigade.fully_shard(module)
    if is_warm:
        loss_of(net, batch_of(6, rank, 0)).backward()
    stop, texts = threading.Event(), []

    def serve():
        try:
            while not stop.is_set():
                with torch.no_grad():
                    net(batch_of(6, rank, 1))
        except RuntimeError as error:
            texts.append(str(error))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        for step in range(30):
            loss_of(net, batch_of(6, rank, step)).backward()
    except RuntimeError as error:
        texts.append(str(error))
    stop.set()
    thread.join()
    dist.destroy_process_group()
    return texts


@pytest.mark.parametrize("is_warm", [True, False])
def test_forwards_beside_training_are_an_error(is_warm):
    """Named errors, never a crash (05_threads_crash_the_process)."""
    for _ in range(2):
        of_ranks = run_ranks(_serves_while_training, is_warm, timeout_s=5, deadline_s=60)
        texts = [text for each in of_ranks for text in each]
        assert texts and all(text.startswith("fully_shard: ") for text in texts), texts
