"""torch.compile of the wrapper, and of the wrapped module."""

import contextlib
import pathlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fcol
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import brigade

from cases import quick
from ranks import on_ranks
from training import CLASSES, assert_equal, inputs, loss_of


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def _around(wrapper, options):
    wrapped = wrapper(_model(), **options)
    return wrapped, torch.compile(wrapped, backend="aot_eager")


def _inside(wrapper, options):
    wrapped = wrapper(torch.compile(_model(), backend="aot_eager"), **options)
    return wrapped, wrapped


def _in_a_step(wrapper, options):
    wrapped = wrapper(_model(), **options)
    return wrapped, torch.compile(lambda x: wrapped(x) * 2, backend="aot_eager")


def _train(rank, wrapped, compiled):
    seen = []
    for x in inputs(rank, 3):
        wrapped.zero_grad()
        loss_of(compiled(x)).backward()
        seen += [p.grad.clone() for p in wrapped.parameters()]
    return seen


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (_around, {"static_graph": True}),
        (_inside, {}),
        (_in_a_step, {"find_unused_parameters": True}),
        pytest.param(_around, {}, marks=pytest.mark.slow),
        pytest.param(_inside, {"static_graph": True}, marks=pytest.mark.slow),
        pytest.param(_in_a_step, {}, marks=pytest.mark.slow),
    ],
)
@on_ranks()
def test_compiled_gradients_have_torchs_bits(rank, make, options):
    results = {}
    for name, wrapper in CLASSES.items():
        torch._dynamo.reset()
        results[name] = _train(rank, *make(wrapper, options))
    assert_equal(results["brigade"], results["torch"])


@pytest.mark.parametrize("make", [_around, _inside, _in_a_step])
@on_ranks(1)
def test_the_compiler_skips_the_wrappers_python_code(rank, make):
    """Records the frames that the compiler converts, by its callback for new frames."""
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    converted, ours = [], []
    package = str(pathlib.Path(brigade.__file__).parent)
    call = CatchErrorsWrapper.__call__

    def recording(self, frame, *args):
        result = call(self, frame, *args)
        if frame.f_code.co_filename.startswith(package):
            ours.append(frame.f_code.co_name)
            if result.guarded_code is not None:
                converted.append(frame.f_code.co_name)
        return result

    CatchErrorsWrapper.__call__ = recording
    _, compiled = make(brigade.DistributedDataParallel, {})
    for step, x in enumerate(inputs(rank, 6)):
        compiled(x).sum().backward()
        if step < 2:
            ours.clear()  # the compiler remembers skipped frames
    assert converted == []
    assert ours == []


@contextlib.contextmanager
def _reduces_in_compiled_backward():
    torch._dynamo.reset()
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        with compiled_autograd._enable(compiler):
            yield
        assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] > 0


@on_ranks()
def test_a_compiled_backward_reduces_without_graph_breaks(rank):
    results = {}
    for name, wrapper in CLASSES.items():
        with _reduces_in_compiled_backward():
            wrapped = wrapper(_model())
            compiled = torch.compile(wrapped, backend="aot_eager", fullgraph=True)
            results[name] = _train(rank, wrapped, compiled)
            with wrapped.no_sync():
                wrapped.zero_grad()
                compiled(inputs(rank, 1)[0]).sum().backward()
            results[name] += [p.grad.clone() for p in wrapped.parameters()]
    assert_equal(results["brigade"], results["torch"])
    assert isinstance(wrapped, TorchDistributedDataParallel)


def _average(state, bucket):
    """Averages like torch's wrapper without a hook. Returns a new tensor, which torch drops."""
    average = fcol.wait_tensor(fcol.all_reduce(bucket[0] / 2, "sum", dist.group.WORLD))
    if torch.compiler.is_compiling():
        return average
    future = torch.futures.Future()
    future.set_result(average)
    return future


_PER_GRADIENT = [default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook, _average]


@pytest.mark.parametrize("hook", quick(_PER_GRADIENT, [_PER_GRADIENT[0], _average]))
@on_ranks()
def test_a_comm_hook_of_a_compiled_backward_has_torchs_bits(rank, hook):
    """Also in an eager backward, in which torch's wrapper doesn't wait for the hook's future."""

    def waiting(state, bucket):
        return hook(state, bucket).wait()

    results = {}
    for name, wrapper in CLASSES.items():
        with _reduces_in_compiled_backward():
            wrapped = wrapper(_model())
            eager = wrapper(_model())
            if name == "brigade":
                wrapped.register_comm_hook(None, hook)
                eager.register_comm_hook(None, hook)
            elif hook is not _average:
                wrapped.register_comm_hook(None, hook)
                eager.register_comm_hook(None, waiting)
            compiled = torch.compile(wrapped, backend="aot_eager", fullgraph=True)
            results[name] = _train(rank, wrapped, compiled)
        results[name] += _train(rank, eager, eager)
    assert_equal(results["brigade"], results["torch"])


@on_ranks()
def test_hooks_of_buckets_are_an_error_in_a_compiled_backward(rank):
    """Built-in hooks have no effect, as in torch."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        wrapped = brigade.DistributedDataParallel(_model())
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(NotImplementedError, match='optimize_ddp="python_reducer"'):
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="DistributedDataParallel: comm hook"):
        wrapped.register_comm_hook(None, _PER_GRADIENT[rank])
    wrapped.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(RuntimeError, match="can only be called once"):
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(NotImplementedError, match="as a tuple, no GradBucket"):
        wrapped(inputs(rank, 1)[0]).sum().backward()


@on_ranks(1)
def test_a_compiled_backward_through_a_reducer_names_the_setting(rank):
    wrapped = brigade.DistributedDataParallel(_model())
    output = wrapped(inputs(rank, 1)[0]).sum()
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(RuntimeError, match=r'optimize_ddp\W+"python_reducer"'),
    ):
        output.backward()
