"""Error texts: remedies in Python's terms, and torch's phrases for which programs search."""

import gc
import os
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.checkpoint import checkpoint

import brigade

from ranks import on_ranks


def _sum(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])


def _takes_a_number(state: object, bucket: int):
    raise AssertionError("not called")


def _returns_a_number(state: object, bucket: dist.GradBucket) -> int:
    raise AssertionError("not called")


class Two(nn.Module):
    """Uses one or both of its layers; the second in two checkpoints if `twice`."""

    def __init__(self, use_both=True, twice=False):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.use_both, self.twice = use_both, twice

    def forward(self, x):
        x = self.a(x)
        if self.twice:
            x = checkpoint(self.b, x, use_reentrant=True)
            return checkpoint(self.b, x, use_reentrant=True)
        return self.b(x) if self.use_both else x


X = torch.ones(1, 2)


def _register(hook, times=1):
    def run(wrapper):
        wrapped = wrapper(nn.Linear(2, 2))
        for _ in range(times):
            wrapped.register_comm_hook(None, hook)

    return run


def _leave_out(wrapper):
    wrapped = wrapper(Two(use_both=False))
    wrapped(X).sum().backward()
    wrapped(X)


def _use_twice(wrapper):
    wrapped = wrapper(Two(twice=True))
    wrapped(X).sum().backward()


# Phrases of torch's class for which programs search.
WORDS = {
    "Communication hook must be callable": _register(3),
    r"bucket annotation should be dist\.GradBucket": _register(_takes_a_number),
    r"return annotation should be torch\.futures\.Future\[": _register(_returns_a_number),
    "register_comm_hook or .* can only be called once": _register(_sum, times=2),
    "uninitialized parameters": lambda wrapper: wrapper(nn.LazyLinear(2)),
    r"(?s)Expected to have finished reduction in the prior iteration.*"
    r"Parameter indices which did not receive grad for rank 0: 2": _leave_out,
    r"(?s)^Expected to mark a variable ready only once\..*"
    r"Parameter at index 3 with name b\.bias": _use_twice,
}


@on_ranks(1)
def test_errors_have_torchs_phrases(rank):
    for words, run in WORDS.items():
        with pytest.raises(Exception, match=words) as theirs:
            run(TorchDistributedDataParallel)
        with pytest.raises(theirs.type, match=words):
            run(brigade.DistributedDataParallel)


# ------------------------------------------------------- remedies in Python


def _error_of(run):
    with pytest.raises(RuntimeError) as raised:
        run(brigade.DistributedDataParallel)
    return str(raised.value)


def _go_back_twice(wrapper):
    wrapped = wrapper(nn.Linear(2, 2))
    loss = wrapped(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _resize(wrapper):
    wrapped = wrapper(nn.Linear(2, 2))
    for parameter in wrapped.parameters():
        parameter.data = torch.ones(3, *parameter.shape[1:])
    wrapped(X)


@on_ranks(1)
def test_errors_name_a_remedy_in_python(rank):
    text = _error_of(_leave_out)
    assert "2 of 4 parameters got no gradient in iteration 1 on rank 0" in text
    assert "parameters 2 ('b.weight'), 3 ('b.bias')." in text
    for option in (
        'strategy="ddp_find_unused_parameters_true"',
        "DistributedDataParallelKwargs(find_unused_parameters=True)",
        "ddp_find_unused_parameters=True",
    ):
        assert option in text
    texts = [text, _error_of(_use_twice), _error_of(_go_back_twice), _error_of(_resize)]
    for text in texts:
        assert not re.search(r"prepare_for_backward|the reducer\.", text), text


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)

    def forward(self, x):
        if not hasattr(self, "second"):
            self.second = nn.Linear(2, 2)
        return self.second(self.first(x))


@on_ranks(1)
def test_the_error_for_lazy_submodules_asks_for_a_forward_first(rank):
    wrapped = brigade.DistributedDataParallel(Lazy())
    wrapped(X).sum().backward()
    with pytest.raises(
        RuntimeError,
        match=r"(?s)added: 'second.weight', 'second.bias'.*creates parameters lazily.*one forward",
    ):
        wrapped(X)


@pytest.mark.parametrize("then", ["state_dict", "save", "evaluation"])
@on_ranks(1)
def test_gradients_that_never_came_are_reported_once(rank, then, tmp_path):
    ddp = brigade.DistributedDataParallel(Two(use_both=False))
    call = {
        "state_dict": ddp.state_dict,
        "save": lambda: brigade.save_whole(ddp, tmp_path / "model.safetensors"),
        "evaluation": torch.no_grad()(lambda: ddp(X)),
    }[then]
    ddp(X).sum().backward()
    with pytest.warns(UserWarning, match="2 of 4 parameters got no gradient in iteration 1"):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    with pytest.raises(RuntimeError, match="2 of 4 parameters got no gradient in iteration 1"):
        ddp(X)


@on_ranks(1)
def test_gradients_that_never_came_are_reported_at_destruction(rank, tmp_path):
    ddp = brigade.DistributedDataParallel(Two(use_both=False))
    ddp(X).sum().backward()
    stderr, path = os.dup(2), tmp_path / "stderr"
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
        del ddp
        gc.collect()
        os.dup2(stderr, 2)
    os.close(stderr)
    assert "2 of 4 parameters got no gradient in iteration 1 on rank 0" in path.read_text()
