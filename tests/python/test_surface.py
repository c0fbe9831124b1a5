"""The classes look like torch's, to users, frameworks, pickle and the compiler."""

import copy
import gc
import inspect
import io
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

from ranks import run_ranks
from training import Perceptron, assert_equal, inputs, loss_of, train


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


@pytest.mark.parametrize("name", ["Reducer", "Logger"])
def test_a_class_has_every_method_of_torchs(name):
    theirs = {m for m in dir(getattr(dist, name)) if not m.startswith("__")}
    assert theirs <= set(dir(getattr(brigade, name)))


def _looks_like_torchs(rank):
    wrapped = brigade.DistributedDataParallel(Perceptron())
    assert isinstance(wrapped, TorchDistributedDataParallel)
    assert isinstance(wrapped.logger, dist.Logger)
    assert isinstance(wrapped.reducer, brigade.Reducer)
    assert all(key.startswith("module.") for key in wrapped.state_dict())
    theirs = TorchDistributedDataParallel(Perceptron())
    wrapped(torch.ones(4, 6))
    theirs(torch.ones(4, 6))
    assert all(hasattr(wrapped, name) for name in vars(theirs))


def test_an_instance_is_one_of_torchs_class_and_has_its_attributes():
    run_ranks(_looks_like_torchs, world_size=1)


def _pickled(rank):
    torch.manual_seed(0)
    wrapped = brigade.DistributedDataParallel(Perceptron())
    before = train(wrapped, inputs(rank, 2))
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert type(again) is brigade.DistributedDataParallel
    del before, wrapped
    results = [train(again, inputs(rank, 2))]
    file.seek(0)
    results.append(train(torch.load(file, weights_only=False), inputs(rank, 2)))
    assert_equal(*results)


def test_a_pickled_wrapper_goes_on_training():
    run_ranks(_pickled)


def _functional_call(rank):
    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2))
    x = torch.full((1, 3), float(rank))
    parameters = {name: torch.zeros_like(p) for name, p in wrapped.named_parameters()}
    assert torch.func.functional_call(wrapped, parameters, x).abs().sum() == 0
    wrapped(x).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[0.5] * 3] * 2


def test_functional_call_leaves_the_parameters_alone():
    run_ranks(_functional_call)


def _compiled(rank):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        wrapped = brigade.DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)))
        model = torch.compile(wrapped, backend="aot_eager") if compiled else wrapped
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        seen = []
        for x in inputs(rank, 3):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            seen += [p.grad.clone() for p in wrapped.parameters()]
            optimizer.step()
        results.append(seen)
    assert_equal(*results)


def test_a_compiled_model_trains_to_the_same_bits():
    run_ranks(_compiled)


def _profiled(rank):
    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2))
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)  # the group's own
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        wrapped(torch.ones(1, 3)).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert "DistributedDataParallel.forward" in names
    assert "c10d::allreduce_" in names, names
    assert "brigade: bucket 0 of 1 launch" in names, names


def test_the_profiler_sees_forward_and_all_reduce():
    run_ranks(_profiled)


def _deleted(rank):
    model = nn.Linear(3, 2)
    wrapped = brigade.DistributedDataParallel(model)
    reference = weakref.ref(wrapped)
    output = wrapped(torch.ones(1, 3))
    del wrapped
    gc.collect()
    assert reference() is None
    output.sum().backward()  # local: the hooks are gone
    assert model.weight.grad.tolist() == [[1.0] * 3] * 2
    model.zero_grad()
    again = brigade.DistributedDataParallel(model)
    again(torch.full((1, 3), float(rank))).sum().backward()
    assert model.weight.grad.tolist() == [[0.5] * 3] * 2


def test_deleting_the_wrapper_takes_its_hooks_off():
    run_ranks(_deleted)


def _hooks_removed(rank):
    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2))
    wrapped._remove_autograd_hooks()
    wrapped(torch.full((1, 3), float(rank))).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[float(rank)] * 3] * 2


def test_without_hooks_gradients_are_local():
    run_ranks(_hooks_removed)


def _new_group(rank):
    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2))
    alone, _ = dist.new_subgroups(group_size=1)
    x = torch.full((1, 3), float(rank))
    wrapped(x).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[0.5] * 3] * 2
    wrapped._update_process_group(alone)
    wrapped.zero_grad()
    wrapped(x).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[float(rank)] * 3] * 2


def test_the_process_group_may_be_replaced():
    run_ranks(_new_group)


def _mesh(rank):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2), device_mesh=mesh)
    wrapped(torch.full((1, 3), float(rank))).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[0.5] * 3] * 2
    with pytest.raises(RuntimeError, match="process_group and device_mesh"):
        brigade.DistributedDataParallel(
            nn.Linear(3, 2), process_group=dist.group.WORLD, device_mesh=mesh
        )
    square = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(RuntimeError, match="2"):
        brigade.DistributedDataParallel(nn.Linear(3, 2), device_mesh=square)


def test_a_mesh_of_one_dimension_stands_for_its_group():
    run_ranks(_mesh)


def _ignored(rank):
    model = Perceptron()
    names = ["layers.0.weight", "layers.1.running_mean"]
    brigade.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    with torch.no_grad():
        model.layers[0].weight.fill_(float(rank))
        model.layers[1].running_mean.fill_(float(rank))
        model.layers[3].weight.fill_(1.0 + rank)
    wrapped = brigade.DistributedDataParallel(model)
    assert model.layers[0].weight.eq(rank).all()
    assert model.layers[1].running_mean.eq(rank).all()
    assert model.layers[3].weight.eq(1).all()
    loss_of(wrapped(inputs(rank, 1)[0])).backward()
    flat = torch.cat([p.grad.flatten() for p in wrapped.parameters()])
    gathered = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(gathered, flat)
    first = model.layers[0].weight.numel()
    assert not torch.equal(gathered[0][:first], gathered[1][:first])
    assert torch.equal(gathered[0][first:], gathered[1][first:])


def test_ignored_tensors_stay_each_ranks_own():
    run_ranks(_ignored)


def _delayed(rank, names):
    """Against torch's class without delay: of 2 ranks' gradients both make the same average.

    Rank 1 goes backward after rank 0, whose gradients would be its own alone if it did not wait
    for the delayed all-reduce.
    """
    store = dist.distributed_c10d._get_default_store()
    results = []
    for kind in (brigade.DistributedDataParallel, None):
        torch.manual_seed(rank)  # rank 0's are broadcast
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        before_them = nn.Parameter(torch.ones(6))  # its gradient comes last
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


def test_named_parameters_may_be_reduced_by_themselves():
    run_ranks(_delayed, ["2.weight", "2.bias"])


def test_all_parameters_may_be_reduced_by_themselves():
    """Torch's own class can't: it has no device, and no _lazy_init_ran."""
    run_ranks(_delayed, ["0.weight", "0.bias", "2.weight", "2.bias"])


def _delayed_until_when(rank):
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="param_to_hook_all_reduce is missing"):
        brigade.DistributedDataParallel(
            model, delay_all_reduce_named_params=[("weight", model.weight)]
        )


def test_parameters_named_for_delay_need_one_to_wait_for():
    run_ranks(_delayed_until_when, world_size=1)


def _constructor_errors(rank):
    wrap = brigade.DistributedDataParallel
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(RuntimeError, match="Linear has no parameter that requires a gradient"):
        wrap(frozen)
    with pytest.raises(RuntimeError, match="'weight'"):
        wrap(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="device_ids"):
        wrap(nn.Linear(2, 2), device_ids=[0])
    with pytest.warns(FutureWarning, match="check_reduction"):
        wrap(nn.Linear(2, 2), check_reduction=True)
    with pytest.raises(RuntimeError, match=r"'weight' Float \[2, [23]\]"):
        wrap(nn.Linear(2, 2 + rank))
    two = copy.deepcopy(nn.ModuleList([nn.Linear(2, 2)] * (1 + rank)))
    wrap(two)  # a shared layer counts once
    with pytest.raises(RuntimeError):
        wrap(nn.ModuleList(nn.Linear(2, 2) for _ in range(1 + rank)))
    wrap(nn.Linear(2, 2))  # the group goes on working


class _OwnBuffer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, x):
        return self.layer(x)


def _ranks_that_differ(rank):
    wrap = brigade.DistributedDataParallel
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers[1].requires_grad_(rank == 0)
    with pytest.raises(RuntimeError, match=r"option 0 .*forward_sync_buffers = (True|False)"):
        wrap(nn.Linear(2, 2), forward_sync_buffers=rank == 0)
    for option in ("find_unused_parameters", "static_graph", "one_backward_per_forward"):
        with pytest.raises(RuntimeError, match=rf"option \d .*{option} = (True|False)"):
            wrap(nn.Linear(2, 2), **{option: rank == 0})
    with pytest.raises(RuntimeError, match=r"buffer 0 .*'seen' Float \[[12]\]"):
        wrap(_OwnBuffer(1 + rank))
    with pytest.raises(RuntimeError, match=r"parameter 2 .*'1.weight' Float .*requires_grad"):
        wrap(layers)
    with pytest.raises(RuntimeError, match=r"parameter 0 .*(Float|Double)"):
        wrap(nn.Linear(2, 2).to((torch.float, torch.double)[rank]))
    strided = nn.Linear(2, 3)
    if rank == 1:
        strided.weight = nn.Parameter(torch.ones(2, 3).t())
    with pytest.raises(RuntimeError, match=r"parameter 0 .*strides"):
        wrap(strided)
    own = wrap(_OwnBuffer(1 + rank), broadcast_buffers=False)  # each keeps its own
    own(torch.ones(1, 2)).sum().backward()


def test_ranks_that_differ_are_told_before_anything_is_sent():
    run_ranks(_ranks_that_differ)


def test_constructor_errors_name_what_is_wrong_on_every_rank():
    run_ranks(_constructor_errors)


def _reducer_alone(rank):
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    reducer = brigade.Reducer(parameters, [[1], [0]], [1 << 20] * 2, dist.group.WORLD)
    for step in range(3):
        output = sum(p.sum() for p in parameters) * (rank + step)
        reducer.prepare_for_backward(output if step % 2 else [output])
        output.backward()
        assert [p.grad.unique().tolist() for p in parameters] == [[0.5 + step]] * 2
        for parameter in parameters:
            parameter.grad = None
    with pytest.raises(TypeError):
        brigade.Reducer(parameters, [[0, 1]])
    with pytest.raises(RuntimeError, match="1"):
        brigade.Reducer(parameters, [[0]], [1 << 20], dist.group.WORLD)
    with pytest.raises(RuntimeError, match="per_bucket_size_limits"):
        brigade.Reducer(parameters, [[0], [1]], [1 << 20], dist.group.WORLD)


def test_a_reducer_works_without_a_module():
    run_ranks(_reducer_alone)


def test_the_stub_is_that_of_the_module(tmp_path):
    """python_bindings/make_stub.py writes it anew."""
    pytest.importorskip("pybind11_stubgen")
    root = pathlib.Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, root / "python_bindings" / "make_stub.py", tmp_path / "_C.pyi"], check=True
    )
    assert (tmp_path / "_C.pyi").read_text() == (
        root / "python_bindings" / "brigade" / "_C.pyi"
    ).read_text()


def test_the_package_is_typed():
    assert (pathlib.Path(brigade.__file__).parent / "py.typed").exists()


def test_the_version_is_that_of_cmakelists_txt():
    text = (pathlib.Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    assert brigade.__version__ == re.search(r"^  VERSION (\S+)$", text, re.MULTILINE)[1]
