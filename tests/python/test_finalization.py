"""Manual finalization of backwards, an option of torch 2.15."""

import pytest
import torch
from torch import nn

import brigade

from exact_training import MODES
from ranks import on_ranks
from training import CLASSES, Perceptron, assert_equal, gradients_of, inputs, loss_of

pytestmark = pytest.mark.skipif(
    not hasattr(CLASSES["torch"], "finalize_backward"), reason="this torch's class has none of it"
)
_NOTHING = "no gradient reduction requires finalization"


@pytest.mark.parametrize("mode", MODES)
@on_ranks()
def test_gradients_are_averaged_when_the_caller_finalizes(rank, mode):
    options = MODES[mode]
    results = {}
    for manual in (False, True):
        torch.manual_seed(0)
        wrapped = brigade.DistributedDataParallel(Perceptron(), bucket_cap_mb=1e-5, **options)
        wrapped.require_manual_backward_finalization = manual
        seen = []
        for x in inputs(rank, 4):
            wrapped.zero_grad()
            loss_of(wrapped(x)).backward()
            if manual:
                wrapped.finalize_backward()
            seen += gradients_of(wrapped)
        results[manual] = seen
    assert_equal(results[True], results[False])


@pytest.mark.parametrize("mode", MODES)
@on_ranks()
def test_forwards_report_whether_finalization_needs_the_end_of_backward(rank, mode):
    options = MODES[mode]
    answers = {}
    for name, wrapper in CLASSES.items():
        wrapped = wrapper(Perceptron(), **options)
        answers[name] = [wrapped.should_finalize_after_backward]
        wrapped.require_manual_backward_finalization = True
        for x in inputs(rank, 4):
            loss = loss_of(wrapped(x))
            answers[name].append(wrapped.should_finalize_after_backward)
            loss.backward()
            wrapped.finalize_backward()
    assert answers["brigade"] == answers["torch"]


@pytest.mark.parametrize("name", CLASSES)
@on_ranks()
def test_a_hook_in_backward_may_finalize_once_all_gradients_are_ready(rank, name):
    """Averages are delivered while backward still runs layers before the model."""
    wrapper = CLASSES[name]
    wrapped = wrapper(nn.Linear(3, 2, bias=False))
    wrapped.require_manual_backward_finalization = True
    before = torch.ones(3, requires_grad=True)
    seen = []

    def on_last_gradient(_):
        wrapped.finalize_backward()
        seen.append(wrapped.module.weight.grad.tolist())

    before.register_post_accumulate_grad_hook(on_last_gradient)
    for step in range(3):
        wrapped.zero_grad()
        wrapped(before.mul(rank + 1.0).mul(1.0).reshape(1, 3)).sum().backward()
        assert len(seen) == step + 1
        assert seen[-1] == wrapped.module.weight.grad.tolist() == [[1.5] * 3] * 2


@pytest.mark.parametrize("name", CLASSES)
@on_ranks()
def test_errors_of_misuse_have_torchs_phrases(rank, name):
    wrapper = CLASSES[name]
    wrapped = wrapper(Perceptron())
    x = inputs(rank, 1)[0]
    with pytest.raises(RuntimeError, match="manual backward finalization is not required"):
        wrapped.finalize_backward()
    wrapped.require_manual_backward_finalization = True
    assert wrapped.require_manual_backward_finalization
    with pytest.raises(RuntimeError, match=_NOTHING):
        wrapped.finalize_backward()
    loss = loss_of(wrapped(x))
    with pytest.raises(RuntimeError, match="cannot be called after forward"):
        wrapped.require_manual_backward_finalization = False
    assert wrapped.require_manual_backward_finalization
    with pytest.raises(RuntimeError, match=_NOTHING):
        wrapped.finalize_backward()
    loss.backward()
    with pytest.raises(RuntimeError, match="cannot be called after forward"):
        wrapped.require_manual_backward_finalization = False
    with pytest.raises(RuntimeError, match="Expected to have finalized the prior backward pass"):
        wrapped(x)
    wrapped.finalize_backward()  # the pending backward
    with pytest.raises(RuntimeError, match=_NOTHING):
        wrapped.finalize_backward()
    with wrapped.no_sync():
        loss_of(wrapped(x)).backward()
        with pytest.raises(RuntimeError, match=_NOTHING):
            wrapped.finalize_backward()
    wrapped.require_manual_backward_finalization = False
    loss_of(wrapped(x)).backward()  # also averages the gradients of no_sync()
    flat = torch.cat([gradient.flatten() for gradient in gradients_of(wrapped)])
    gathered = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(gathered, flat)
    assert torch.equal(*gathered)


@on_ranks(1)
def test_without_a_reducer_there_is_nothing_to_finalize(rank):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        compiled = brigade.DistributedDataParallel(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="Manual backward finalization is not supported with"):
        compiled.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="Manual backward finalization is not supported with"):
        compiled.finalize_backward()
