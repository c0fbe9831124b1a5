"""One rank fails: every rank raises and says which one it was, then all train on exactly."""

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from cases import pairwise
from exact_training import MODES, Training, UserError, weights_of
from ranks import on_ranks

# ------------------------------------------------------- what users' code raises


@pairwise(
    world_size=[2, 3],
    mode=MODES,
    name=["p2", "p1", "p0"],
)
@on_ranks()
def test_an_exception_in_the_backward_of_one_rank_ends_that_of_all(rank, name, mode, world_size):
    options = MODES[mode]
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
@on_ranks()
def test_a_comm_hook_that_raises_on_one_rank_is_quoted_on_the_others(rank, mode, world_size):
    options = MODES[mode]
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


# ---------------------------------------------------- gradients that come twice


def _twice_in(training: Training) -> str:
    return (
        r"the gradient of parameter 2 \('p2'\) became ready twice in "
        rf"iteration {training.iteration + 1} on rank "
    )


def _hidden_in(training: Training) -> str:
    return rf"backward reached parameter 2 \('p2'\) in iteration {training.iteration + 1} on rank "


@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["all_ranks", "one_rank"])
@pytest.mark.parametrize("mode", ["plain", "views", "find_unused"])
@on_ranks()
def test_a_parameter_in_two_reentrant_checkpoints_is_named(rank, mode, failing):
    training = Training(rank, MODES[mode])
    # The search for unused parameters does not see what such a checkpoint captures.
    text_of = _hidden_in if mode == "find_unused" else _twice_in
    for _ in range(2):
        text = text_of(training)
        own_text = rf"(?s){text}{rank}.*reentrant checkpoint.*set static_graph"
        training.expect_failure(failing, RuntimeError, own_text, text, twice=2)
        training.expect_steps(2)


# --------------------------------------------------- static graphs that change


@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["all_ranks", "one_rank"])
@on_ranks()
def test_a_parameter_used_more_often_than_in_the_first_iteration_is_named(rank, failing):
    training = Training(rank, MODES["static_graph"])
    training.expect_steps(1)
    for _ in range(2):
        text = _twice_in(training)
        training.expect_failure(
            failing, RuntimeError, rf"(?s){text}{rank}.*than in the first", text, twice=2
        )
        training.expect_steps(2)


@on_ranks()
def test_a_parameter_that_the_first_iteration_did_not_use_is_named(rank):
    training = Training(rank, MODES["static_graph"])
    training.expect_steps(2, without=1)
    with pytest.raises(
        RuntimeError, match=r"parameter 1 \('p1'\) was reached by backward in .* not in the first"
    ):
        training.backward()
    training.expect_steps(2, without=1)


@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["all_ranks", "one_rank"])
@on_ranks()
def test_a_parameter_left_out_after_the_first_iteration_is_named_in_the_next(rank, failing):
    training = Training(rank, MODES["static_graph"])
    training.expect_steps(1)
    for _ in range(2):
        iteration = training.iteration + 1
        text = rf"1 of 3 parameters got no gradient in iteration {iteration} on rank "
        if rank in failing:
            training.backward(without=1)
            with pytest.raises(RuntimeError, match=rf"(?s){text}{rank}.*'p1'.*first iteration"):
                training.wrapped(weights_of(rank, iteration), None)
        else:
            training.expect_failure(failing, RuntimeError, rf"{text}1: parameter 1 \('p1'\)")
        training.expect_steps(2)
