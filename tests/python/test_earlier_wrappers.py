"""Ranks differ in how long they keep an earlier wrapper of the same group."""

import gc

import pytest

from exact_training import Training
from ranks import run_ranks

pytestmark = pytest.mark.slow


def _wrap_again(rank, keepers):
    kept = []
    for _ in range(3):
        training = Training(rank, {})
        training.expect_steps(2)
        if rank in keepers:
            kept.append(training)  # as the traceback of an exception would
        del training
        gc.collect()


@pytest.mark.parametrize("keepers", [[0], [1], [], [0, 1]], ids=["0", "1", "none", "all"])
def test_a_rank_that_keeps_an_earlier_wrapper_meets_its_peers_in_the_next(keepers):
    run_ranks(_wrap_again, keepers, timeout_s=15, deadline_s=60)
