"""Training over process groups written in Python, whose futures hold Python objects."""

import pytest
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from exact_training import MODES, Training
from python_groups import FUTURES, GroupInPython
from ranks import run_ranks
from training import CLASSES, Perceptron, assert_same_bits, both, inputs

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2])


def _train(rank, kind, mode, futures, twice=None, with_hook=False):
    for future in futures:
        group = GroupInPython(dist.group.WORLD, future)
        training = Training(rank, {**MODES[mode], "process_group": group}, CLASSES[kind])
        if with_hook:
            training.wrapped.register_comm_hook(group, default_hooks.allreduce_hook)
        # In a world of one, nobody uses p1 where rank 0 does not.
        nobody = mode == "find_unused" and dist.get_world_size() == 1
        training.expect_steps(4, without=1 if nobody else None, twice=twice)
        assert group.num_reduced >= 4


def _run(function, *args, world_size=2):
    run_ranks(function, *args, world_size=world_size, timeout_s=20, deadline_s=120)


@WORLD_SIZES
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CLASSES)
def test_gradients_are_averaged_in_each_mode(kind, mode, world_size):
    _run(_train, kind, mode, list(FUTURES), world_size=world_size)


@WORLD_SIZES
@pytest.mark.parametrize("kind", CLASSES)
def test_a_static_graph_with_a_parameter_in_two_checkpoints(kind, world_size):
    _run(_train, kind, "static_graph", list(FUTURES), 2, world_size=world_size)


# Of these futures torch's own hook takes the first element.
@pytest.mark.parametrize("kind", CLASSES)
def test_a_hook_over_such_a_group(kind):
    _run(_train, kind, "plain", ["inner", "list", "tuple", "continued"], None, True)


def _same_bits(rank, options):
    for future in FUTURES:
        group = GroupInPython(dist.group.WORLD, future)
        assert_same_bits(both(Perceptron, inputs(rank, 4), process_group=group, **options))


@WORLD_SIZES
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_buffers_and_gradients_have_the_bits_of_torchs_class(views, world_size):
    _run(_same_bits, {"gradient_as_bucket_view": views}, world_size=world_size)
