"""A rank's other threads: they run while backward waits for a peer, and use the same model."""

import concurrent.futures
import sys
import threading
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from exact_training import MODES, Training
from ranks import on_ranks
from sharded_training import Pair, batch_of

# Rounds between the peer and the other thread before the peer joins. Backward reaches its wait
# meanwhile, and the thread needs the GIL in each round.
ROUNDS = 50


def _all_reduce(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / 2)


def _other_thread(in_backward, seen):
    store = dist.distributed_c10d._get_default_store()
    in_backward.wait()
    for i in range(ROUNDS):
        store.set(f"runs {i}", "")
        store.wait([f"heard {i}"])
    frame = sys._current_frames()[threading.main_thread().ident]
    seen += [caller.name for caller in traceback.extract_stack(frame)]
    store.set("seen", "")


def _waits_for_the_thread():
    store = dist.distributed_c10d._get_default_store()
    for i in range(ROUNDS):
        store.wait([f"runs {i}"])
        store.set(f"heard {i}", "")
    store.wait(["seen"])


@pytest.mark.parametrize("with_hook", [False, True], ids=["all_reduce", "python_hook"])
@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["plain", "find_unused", "static_graph"],
)
@on_ranks(timeout_s=30)
def test_a_thread_runs_while_backward_waits_for_a_peer(rank, options, with_hook):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped = brigade.DistributedDataParallel(model, bucket_cap_mb=1e-6, **options)
    if with_hook:
        wrapped.register_comm_hook(None, _all_reduce)
    x = torch.full((1, 2), 2.0 * rank)
    for _ in range(2):  # buckets are final after two
        wrapped(x).sum().backward()
    wrapped.zero_grad()
    loss = wrapped(x).sum()
    if rank == 1:
        _waits_for_the_thread()
        loss.backward()
    else:
        in_backward, seen = threading.Event(), []
        thread = threading.Thread(target=_other_thread, args=(in_backward, seen), daemon=True)
        thread.start()
        model[1].bias.register_hook(lambda gradient: in_backward.set())
        loss.backward()
        thread.join()
        assert "backward" in seen, seen
    assert model[1].bias.grad.eq(1).all()
    # The average of gradients that are 0 and 2 times the input.
    assert torch.equal(model[0].weight.grad, model[1].weight.detach().sum(0)[:, None].expand(2, 2))


@on_ranks(timeout_s=30, deadline_s=90)
def test_two_threads_make_one_root(rank):
    pair = Pair(rank)
    both = threading.Barrier(2)

    def explain():
        both.wait()
        return pair.model.explain()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        texts = [pool.submit(explain) for _ in range(2)]
        assert texts[0].result() == texts[1].result()
    pair.expect_step(0)


def _infer_during_forward(inside, infer):
    """Makes forwards of the module `inside` wait for `infer` in another thread, without gradients.

    Returns the hook's handle and a list of the thread's exceptions.
    """
    errors, thread = [], concurrent.futures.ThreadPoolExecutor(1)

    def wait_for_thread(*_):
        if threading.current_thread() is threading.main_thread():
            errors.append(thread.submit(torch.no_grad()(infer)).exception())

    return inside.register_forward_pre_hook(wait_for_thread), errors


@pytest.mark.parametrize("mode", [*MODES, "one_backward_per_forward"])
@on_ranks(timeout_s=30)
def test_gradients_are_exact_while_a_thread_infers(rank, mode):
    training = Training(rank, MODES.get(mode, {mode: True}))
    weights = [torch.ones_like(p) for p in training.model.parameters()]
    _, errors = _infer_during_forward(training.model, lambda: training.wrapped(weights))
    training.expect_steps(4)
    assert errors == [None] * 4


@on_ranks(timeout_s=30)
def test_a_forward_during_a_sharded_forward_of_another_thread_is_an_error(rank):
    pair = Pair(rank)
    pair.expect_step(0)
    handle, errors = _infer_during_forward(pair.model.head, lambda: pair.model(batch_of(rank, 1)))
    words = "found a forward during one in another thread"
    with pytest.raises(RuntimeError, match=words):
        pair.loss(1).backward()
    assert words in str(errors[0])
    handle.remove()
    pair.expect_step(1)
