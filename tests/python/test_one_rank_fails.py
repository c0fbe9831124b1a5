"""One rank fails: every rank raises and says which one it was, then all train on exactly."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import brigade

from ranks import run_ranks

ONE_BUCKET_EACH = {"bucket_cap_mb": 1e-6}  # once the order of gradients is known
SIZES = (2, 3, 5)
MODES = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}
LEARNING_RATE = 1 / 64


class UserError(Exception):
    """What a user's own code raises."""


class Toy(nn.Module):
    """Its gradients are the weights it is called with; those of later parameters come earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.p0, self.p1, self.p2 = (nn.Parameter(torch.ones(size)) for size in SIZES)

    def forward(self, weights, twice):
        terms = []
        for i, (p, w) in enumerate(zip(self.parameters(), weights, strict=True)):
            if i == twice:
                terms += [_recomputed(p, w / 2) for _ in range(2)]
            elif w is not None:
                terms.append((p * w).sum())
        return sum(terms)


def _recomputed(parameter: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A term whose gradient goes to the parameter in a backward of its own."""
    one = torch.ones(1, requires_grad=True)
    return checkpoint(lambda x: (parameter * weight * x).sum(), one, use_reentrant=True)


def _weights(rank: int, iteration: int) -> list[torch.Tensor | None]:
    """Others for each rank, parameter, element and iteration.

    Multiples of 12, whose averages over 2 and 3 ranks are exact.
    """
    return [
        12.0 * (torch.arange(size) + 7 * i + 30 * iteration + 100 * rank + 1)
        for i, size in enumerate(SIZES)
    ]


class Training:
    """Steps of SGD with a Toy.

    Args:
        rank: This process's.
        options: Of the wrapper. With find_unused_parameters, rank 0 never uses p1.
    """

    def __init__(self, rank: int, options: dict[str, bool]) -> None:
        self.rank = rank
        self.model = Toy()
        self.wrapped = brigade.DistributedDataParallel(self.model, **ONE_BUCKET_EACH, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.iteration = 0
        self._rank_0_never = 1 if "find_unused_parameters" in options else None

    def backward(self, *, without: int | None = None, twice: int | None = None) -> None:
        self.iteration += 1
        self.optimizer.zero_grad()
        weights = self._weights_of(self.rank)
        if without is not None:
            weights[without] = None
        self.wrapped(weights, twice).backward()

    def expect_steps(self, steps: int, *, without: int | None = None) -> None:
        """Trains; gradients are the averages, parameters are the same on all ranks."""
        world_size = dist.get_world_size()
        for _ in range(steps):
            before = [p.detach().clone() for p in self.model.parameters()]
            self.backward(without=without)
            self.optimizer.step()
            of_ranks = [self._weights_of(rank) for rank in range(world_size)]
            for i, (p, old) in enumerate(zip(self.model.parameters(), before, strict=True)):
                if i == without:
                    assert p.grad is None
                    continue
                average = sum(w[i] for w in of_ranks if w[i] is not None) / world_size
                assert torch.equal(p.grad, average), (self.iteration, i, p.grad, average)
                assert torch.equal(p.detach(), old - LEARNING_RATE * average)
        flat = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        everybodys = [torch.empty_like(flat) for _ in range(world_size)]
        dist.all_gather(everybodys, flat)
        assert all(torch.equal(flat, other) for other in everybodys)

    def expect_failure(self, failing, error, own_text, peers_text=None, **misuse) -> None:
        """Raises from backward on every rank: the own error, or the name of the first to fail."""
        iteration = self.iteration + 1
        if self.rank in failing:
            with pytest.raises(error, match=own_text):
                self.backward(**misuse)
            return
        with pytest.raises(dist.DistBackendError) as caught:
            self.backward()
        text = str(caught.value)
        start = f"Reducer: rank {failing[0]} failed in iteration {iteration} at bucket "
        assert text.startswith(start), text
        assert re.search(peers_text or own_text, text), text

    def _weights_of(self, rank: int) -> list[torch.Tensor | None]:
        weights = _weights(rank, self.iteration)
        if rank == 0 and self._rank_0_never is not None:
            weights[self._rank_0_never] = None
        return weights


# ------------------------------------------------------- what users' code raises


def _tensor_hook_raises(rank, name, options):
    training = Training(rank, options)

    def raise_once(gradient):
        handle.remove()
        raise UserError("the user's own")

    for _ in range(2):  # in the first iteration and in a later one
        if rank == 1:
            handle = getattr(training.model, name).register_hook(raise_once)
        training.expect_failure([1], UserError, "^the user's own$", "an exception ended backward")
        training.expect_steps(2)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["p2", "p1", "p0"], ids=["first", "middle", "last"])
def test_an_exception_in_the_backward_of_one_rank_ends_that_of_all(name, mode, world_size):
    run_ranks(_tensor_hook_raises, name, MODES[mode], world_size=world_size)


def _comm_hook_raises(rank, options):
    armed = False

    def hook(state, bucket):
        nonlocal armed
        if armed and bucket.is_last():
            armed = False
            raise UserError("no disk")
        return default_hooks.allreduce_hook(None, bucket)

    training = Training(rank, options)
    training.wrapped.register_comm_hook(None, hook)
    for _ in range(2):
        armed = rank == 1
        training.expect_failure([1], UserError, "^no disk$", "UserError: no disk")
        training.expect_steps(2)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_comm_hook_that_raises_on_one_rank_is_quoted_on_the_others(mode, world_size):
    run_ranks(_comm_hook_raises, MODES[mode], world_size=world_size)


# ---------------------------------------------------- gradients that come twice


def _twice_in(training: Training) -> str:
    return (
        r"the gradient of parameter 2 \('p2'\) became ready twice in "
        rf"iteration {training.iteration + 1} on rank "
    )


def _ready_twice(rank, mode, failing):
    training = Training(rank, MODES[mode])
    for _ in range(2):
        text = _twice_in(training)
        own_text = rf"(?s){text}{rank}.*reentrant checkpoint.*set static_graph"
        training.expect_failure(failing, RuntimeError, own_text, text, twice=2)
        training.expect_steps(2)


@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["all_ranks", "one_rank"])
@pytest.mark.parametrize("mode", ["plain", "views", "find_unused"])
def test_a_parameter_in_two_reentrant_checkpoints_is_named(mode, failing):
    run_ranks(_ready_twice, mode, failing)


# --------------------------------------------------- static graphs that change


def _used_more_often(rank, failing):
    training = Training(rank, MODES["static_graph"])
    training.expect_steps(1)
    for _ in range(2):
        text = _twice_in(training)
        training.expect_failure(
            failing, RuntimeError, rf"(?s){text}{rank}.*than in the first", text, twice=2
        )
        training.expect_steps(2)


@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["all_ranks", "one_rank"])
def test_a_parameter_used_more_often_than_in_the_first_iteration_is_named(failing):
    run_ranks(_used_more_often, failing)


def _used_for_the_first_time(rank):
    training = Training(rank, MODES["static_graph"])
    training.expect_steps(2, without=1)
    with pytest.raises(
        RuntimeError, match=r"parameter 1 \('p1'\) was reached by backward in .* not in the first"
    ):
        training.backward()
    training.expect_steps(2, without=1)


def test_a_parameter_that_the_first_iteration_did_not_use_is_named():
    run_ranks(_used_for_the_first_time)


def _left_out(rank, failing):
    training = Training(rank, MODES["static_graph"])
    training.expect_steps(1)
    for _ in range(2):
        iteration = training.iteration + 1
        text = rf"1 of 3 parameters got no gradient in iteration {iteration} on rank "
        if rank in failing:
            training.backward(without=1)
            with pytest.raises(RuntimeError, match=rf"(?s){text}{rank}.*'p1'.*first iteration"):
                training.wrapped(_weights(rank, iteration), None)
        else:
            training.expect_failure(failing, RuntimeError, rf"{text}1: parameter 1 \('p1'\)")
        training.expect_steps(2)


@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["all_ranks", "one_rank"])
def test_a_parameter_left_out_after_the_first_iteration_is_named_in_the_next(failing):
    run_ranks(_left_out, failing)
