"""What torch's profiler shows of a step, under the names and kinds that tools look for."""

import pytest
import torch
from torch import nn

from ranks import run_ranks
from training import CLASSES


def _ranges(rank, name, kind, options):
    """Kinds: a user's annotation, or an operation."""
    found = {}
    for which, wrapper in CLASSES.items():
        wrapped = wrapper(nn.Linear(3, 2), **options)
        wrapped(torch.ones(1, 3)).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            wrapped(torch.ones(1, 3)).sum().backward()
        found[which] = [e.is_user_annotation for e in profile.events() if e.name.endswith(name)]
    assert found["torch"] == [kind == "annotation"]
    assert found["brigade"] == found["torch"]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("DistributedDataParallel.forward", "annotation", {}),
        ("search_unused_parameters", "operation", {"find_unused_parameters": True}),
    ],
    ids=["forward", "search"],
)
def test_a_range_has_torchs_name_and_kind(name, kind, options):
    run_ranks(_ranges, name, kind, options, world_size=1)
