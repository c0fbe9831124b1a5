"""Ranks differ in how long they keep an earlier wrapper of the same group."""

import gc

import pytest

from exact_training import Training
from ranks import on_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("keepers", [[0], [1], [], [0, 1]], ids=["0", "1", "none", "all"])
@on_ranks(timeout_s=15, deadline_s=60)
def test_a_rank_that_keeps_an_earlier_wrapper_meets_its_peers_in_the_next(rank, keepers):
    kept = []
    for _ in range(3):
        training = Training(rank, {})
        training.expect_steps(2)
        if rank in keepers:
            kept.append(training)  # as the traceback of an exception would
        del training
        gc.collect()
