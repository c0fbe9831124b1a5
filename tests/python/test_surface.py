"""The classes have torch's interface for users, frameworks, pickle and the compiler."""

import gc
import inspect
import pathlib
import re
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import brigade

from ranks import on_ranks
from training import Perceptron, assert_equal, inputs, loss_of


def _arguments(text: str) -> list[str]:
    return re.findall(r"(?:[(]|, )(\w+): ", text[: text.rindex(")")])


def test_the_wrapper_takes_torchs_arguments_in_order_and_then_its_own_by_name():
    ours = inspect.signature(brigade.DistributedDataParallel)
    theirs = inspect.signature(TorchDistributedDataParallel)
    names = list(ours.parameters)
    assert names[: len(theirs.parameters)] == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        if name != "broadcast_buffers" or "forward_sync_buffers" in theirs.parameters:
            assert ours.parameters[name].default == parameter.default, name
        assert ours.parameters[name].kind == parameter.kind, name
    of_newer_torchs = {"forward_sync_buffers", "lazy_bucket_allocation"}
    for name in set(names[len(theirs.parameters) :]) - of_newer_torchs:
        assert ours.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY, name


def test_the_reducer_takes_torchs_arguments_in_order_and_then_its_own():
    ours = _arguments(brigade.Reducer.__init__.__doc__)
    theirs = _arguments(dist.Reducer.__init__.__doc__)
    assert ours[1 : len(theirs)] == theirs[1:]
    assert "*, rebuild_buckets" in brigade.Reducer.__init__.__doc__


def test_the_reducer_has_the_methods_that_torchs_wrapper_calls():
    theirs = {m for m in dir(dist.Reducer) if not m.startswith("__")}
    assert theirs - set(dir(brigade.Reducer)) == {
        "_get_zeros_like_grad_buckets",  # replaced by _shadow_iteration()
        "_run_comm_hook",
        "_set_optimizer_in_backward",  # replaced by _step_in_backward()
        "_set_sparse_metadata",
        "get_backward_stats",
        "set_logger",
    }


@on_ranks(1)
def test_an_instance_is_one_of_torchs_class_and_has_its_attributes(rank):
    wrapped = brigade.DistributedDataParallel(Perceptron())
    assert isinstance(wrapped, TorchDistributedDataParallel)
    assert isinstance(wrapped.logger, dist.Logger)
    assert isinstance(wrapped.reducer, brigade.Reducer)
    assert all(key.startswith("module.") for key in wrapped.state_dict())
    theirs = TorchDistributedDataParallel(Perceptron())
    wrapped(torch.ones(4, 6))
    theirs(torch.ones(4, 6))
    assert all(hasattr(wrapped, name) for name in vars(theirs))


@on_ranks()
def test_deleting_the_wrapper_removes_its_hooks(rank):
    model = nn.Linear(3, 2)
    wrapped = brigade.DistributedDataParallel(model)
    reference = weakref.ref(wrapped)
    output = wrapped(torch.ones(1, 3))
    del wrapped
    gc.collect()
    assert reference() is None
    output.sum().backward()  # no collective: the hooks are removed
    assert model.weight.grad.tolist() == [[1.0] * 3] * 2
    model.zero_grad()
    again = brigade.DistributedDataParallel(model)
    again(torch.full((1, 3), float(rank))).sum().backward()
    assert model.weight.grad.tolist() == [[0.5] * 3] * 2


@on_ranks()
def test_the_process_group_may_be_replaced(rank):
    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2))
    alone, _ = dist.new_subgroups(group_size=1)
    x = torch.full((1, 3), float(rank))
    wrapped(x).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[0.5] * 3] * 2
    wrapped._update_process_group(alone)
    wrapped.zero_grad()
    wrapped(x).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[float(rank)] * 3] * 2


@pytest.mark.parametrize(
    "names",
    [
        ["2.weight", "2.bias"],
        # torch's class can't do this: it has no device and no _lazy_init_ran.
        ["0.weight", "0.bias", "2.weight", "2.bias"],
    ],
)
@on_ranks()
def test_named_parameters_may_have_a_delayed_all_reduce(rank, names):
    """Compares with torch's class without delay, whose averages over 2 ranks are equal.

    Rank 1 runs backward after rank 0. Without waiting for the delayed all-reduce, rank 0 would have
    its local gradients.
    """
    store = dist.distributed_c10d._get_default_store()
    results = []
    for kind in (brigade.DistributedDataParallel, None):
        torch.manual_seed(rank)  # rank 0's are broadcast
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        before_them = nn.Parameter(torch.ones(6))  # its gradient is ready last
        if kind is None:
            wrapped = TorchDistributedDataParallel(model)
        else:
            wrapped = kind(
                model,
                delay_all_reduce_named_params=[(n, model.get_parameter(n)) for n in names],
                param_to_hook_all_reduce=before_them,
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=1 / 128, momentum=0.5)
        seen = []
        for x in inputs(rank, 4):
            optimizer.zero_grad()
            loss = loss_of(wrapped(x * before_them))
            if kind is not None:
                key = f"backward {len(seen)}"
                if rank == 0:
                    loss.register_hook(lambda grad, key=key: store.set(key, ""))
                else:
                    store.wait([key])
            loss.backward()
            seen += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        results.append(seen + [p.detach().clone() for p in model.parameters()])
    assert_equal(*results)


@on_ranks()
def test_ranks_that_differ_raise_before_anything_is_sent(rank):
    wrap = brigade.DistributedDataParallel
    for option in (
        "forward_sync_buffers",
        "find_unused_parameters",
        "static_graph",
        "one_backward_per_forward",
    ):
        with pytest.raises(
            RuntimeError, match=rf"option {option} differs between ranks:\n  rank 0: True"
        ):
            wrap(nn.Linear(2, 2), **{option: rank == 0})
    own = nn.Linear(2, 2)
    own.register_buffer("own", torch.zeros(1 + rank))
    with pytest.raises(
        RuntimeError, match=r"buffer 'own' differs between ranks:\n  rank 0: float32, shape \[1\]"
    ):
        wrap(own)
    wrap(own, broadcast_buffers=False)(torch.ones(1, 2)).sum().backward()


@on_ranks()
def test_a_reducer_works_without_a_module(rank):
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    reducer = brigade.Reducer(parameters, [[1], [0]], [1 << 20] * 2, dist.group.WORLD)
    for step in range(3):
        output = sum(p.sum() for p in parameters) * (rank + step)
        reducer.prepare_for_backward(output if step % 2 else [output])
        output.backward()
        assert [p.grad.unique().tolist() for p in parameters] == [[0.5 + step]] * 2
        for parameter in parameters:
            parameter.grad = None


def test_the_stub_matches_the_module(tmp_path):
    """If this fails, run python_bindings/make_stub.py."""
    pytest.importorskip("pybind11_stubgen")
    root = pathlib.Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, root / "python_bindings" / "make_stub.py", tmp_path / "_C.pyi"], check=True
    )
    assert (tmp_path / "_C.pyi").read_text() == (
        root / "python_bindings" / "brigade" / "_C.pyi"
    ).read_text()


def test_the_version_is_that_of_cmakelists_txt():
    text = (pathlib.Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    assert brigade.__version__ == re.search(r"^  VERSION (\S+)$", text, re.MULTILINE)[1]
