"""What a comm hook may return for a bucket: the gradients' kind of number."""

import pytest
import torch
import torch.distributed as dist

from exact_training import MODES, Training
from ranks import on_ranks

WORDS = r"(?i)int32|int\b|integer"


@pytest.mark.parametrize("mode", MODES)
@on_ranks(timeout_s=20, deadline_s=60)
def test_a_collectives_own_future_will_do(rank, mode):
    """Of a collective: its value is a list of the bucket's buffer."""
    options = MODES[mode]

    def hook(size, bucket):
        return dist.all_reduce(bucket.buffer().div_(size), async_op=True).get_future()

    training = Training(rank, options)
    training.wrapped.register_comm_hook(dist.get_world_size(), hook)
    training.expect_steps(4)


@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["all_ranks", "one_rank"])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(timeout_s=20, deadline_s=60)
def test_integers_for_floating_gradients_are_an_error_on_every_rank(rank, mode, failing):
    options = MODES[mode]
    armed = False

    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)

        def average(done):
            result = done.value()[0] / dist.get_world_size()
            return result.to(torch.int32) if armed and bucket.is_last() else result

        return work.get_future().then(average)

    training = Training(rank, options)
    training.wrapped.register_comm_hook(None, hook)
    for _ in range(2):
        armed = rank in failing
        training.expect_failure(failing, (RuntimeError, TypeError, ValueError), WORDS)
        assert training.wrapped.reducer.can_continue()
        armed = False
        training.expect_steps(2)
