"""What is done with a forward's outputs, and between two backwards from them."""

import pytest
import torch
from torch import nn

from ranks import on_ranks
from training import CLASSES, assert_equal, inputs


class _Marked(torch.Tensor):
    """A subclass in Python, as quantities with units are."""


class _Heads(nn.Module):
    """Outputs that their own backward needs."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, which="both"):
        heads = {"left": lambda: self.left(x).tanh(), "right": lambda: self.right(x).tanh()}
        return heads[which]() if which in heads else (heads["left"](), heads["right"]())


@pytest.mark.parametrize("which", ["left", "both"])
@on_ranks()
def test_outputs_may_be_changed_in_place_where_unused_parameters_are_looked_for(rank, which):
    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        wrapped = wrapper(_Heads(), find_unused_parameters=True)
        seen = []
        for x in inputs(rank, 3):
            wrapped.zero_grad()
            outputs = wrapped(x, which)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum(output.mul_(2).square().sum() for output in outputs).backward()
            seen += [None if p.grad is None else p.grad.clone() for p in wrapped.parameters()]
        results[name] = seen
    assert_equal(results["brigade"], results["torch"])


@pytest.mark.parametrize("which", ["left", "both"])
@pytest.mark.parametrize("copies", [True, False])
@on_ranks()
def test_outputs_keep_their_subclass_of_tensor(rank, which, copies):
    class Model(_Heads):
        def forward(self, x, which):
            outputs = super().forward(x, which)
            if which == "both":
                return outputs[0].as_subclass(_Marked), outputs[1]
            return outputs.as_subclass(_Marked)

    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        wrapped = wrapper(Model(), find_unused_parameters=True)
        wrapped._set_ddp_sink_clone(copies)
        outputs = wrapped(inputs(rank, 1)[0], which)
        outputs = outputs if which == "both" else (outputs,)
        assert [type(output) for output in outputs] == [_Marked, torch.Tensor][: len(outputs)]
        outputs[0].square().sum().backward()  # the other output is left out
        results[name] = [None if p.grad is None else p.grad for p in wrapped.parameters()]
    assert_equal(results["brigade"], results["torch"])


class _WithMeans(_Heads):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        del self.unused

    def forward(self, x):
        return super().forward(self.norm(x))


@on_ranks(timeout_s=30)
def test_a_forward_without_gradients_between_two_backwards_leaves_their_reduction_alone(rank):
    results = {}
    for name, wrapper in CLASSES.items():
        torch.manual_seed(0)
        model = _WithMeans()
        model.norm.requires_grad_(False)  # both backwards would go through it
        wrapped = wrapper(model)
        seen = []
        for x in inputs(rank, 3):
            wrapped.zero_grad()
            left, right = wrapped(x)
            left.sum().backward()
            with torch.no_grad():
                seen += [output.clone() for output in wrapped(x + 1)]
            right.square().sum().backward()
            seen += [None if p.grad is None else p.grad.clone() for p in wrapped.parameters()]
            seen += [buffer.clone() for buffer in wrapped.buffers()]
        results[name] = seen
    assert_equal(results["brigade"], results["torch"])
