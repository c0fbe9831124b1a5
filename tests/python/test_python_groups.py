"""Training over process groups written in Python, whose futures hold Python objects."""

import pytest
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from exact_training import MODES, Training
from python_groups import FUTURES, GroupInPython
from ranks import on_ranks
from training import CLASSES, Perceptron, assert_same_bits, both, inputs

LIMITS = {"timeout_s": 20, "deadline_s": 120}
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2])


def _train(rank, kind, mode, futures, with_hook=False):
    for future in futures:
        group = GroupInPython(dist.group.WORLD, future)
        training = Training(rank, {**MODES[mode], "process_group": group}, CLASSES[kind])
        assert group.num_waited > 0  # also with world size 1, as with torch's class
        if with_hook:
            training.wrapped.register_comm_hook(group, default_hooks.allreduce_hook)
        # With world size 1 no rank uses p1 if rank 0 does not.
        nobody = mode == "find_unused" and dist.get_world_size() == 1
        training.expect_steps(4, without=1 if nobody else None)
        assert group.num_reduced >= 4


@WORLD_SIZES
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CLASSES)
@on_ranks(**LIMITS)
def test_gradients_are_averaged_in_each_mode(rank, kind, mode, world_size):
    _train(rank, kind, mode, FUTURES)


@pytest.mark.parametrize("kind", CLASSES)
@on_ranks(**LIMITS)
def test_a_hook_over_such_a_group(rank, kind):
    # torch's own hook takes the first element of these futures' values.
    _train(rank, kind, "plain", ["inner", "list", "tuple", "continued"], with_hook=True)


@WORLD_SIZES
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@on_ranks(**LIMITS)
def test_buffers_and_gradients_have_the_bits_of_torchs_class(rank, views, world_size):
    for future in FUTURES:
        group = GroupInPython(dist.group.WORLD, future)
        options = {"process_group": group, "gradient_as_bucket_view": views}
        assert_same_bits(both(Perceptron, inputs(rank, 4), **options))
