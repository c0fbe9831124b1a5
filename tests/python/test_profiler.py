"""What is seen of a step: torch's profiler, under its names and kinds, and the timeline."""

import datetime
import os
import pathlib
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks, run_ranks
from training import CLASSES


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("DistributedDataParallel.forward", "annotation", {}),
        ("search_unused_parameters", "operation", {"find_unused_parameters": True}),
    ],
    ids=["forward", "search"],
)
@on_ranks(1)
def test_a_range_has_torchs_name_and_kind(rank, name, kind, options):
    """Kinds: a user's annotation, or an operation."""
    found = {}
    for which, wrapper in CLASSES.items():
        wrapped = wrapper(nn.Linear(3, 2), **options)
        wrapped(torch.ones(1, 3)).sum().backward()
        # Not backward: Gloo's threads tell of the end of its works a little late, and a profile
        # that is collecting its events by then may lose this thread's.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss = wrapped(torch.ones(1, 3)).sum()
        loss.backward()
        found[which] = [e.is_user_annotation for e in profile.events() if e.name.endswith(name)]
    assert found["torch"] == [kind == "annotation"]
    assert found["brigade"] == found["torch"]


@on_ranks()
def test_a_timeline_is_described_bucket_by_bucket(rank):
    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2), bucket_cap_mb_list=[4 / 2**20])
    assert wrapped.reducer.describe_timeline() == "no iteration has been sampled\n"
    for _ in range(3):
        wrapped(torch.ones(1, 3)).sum().backward()
    totals, heads, *buckets = wrapped.reducer.describe_timeline().splitlines()
    assert totals.startswith("iteration 3, ms: forward ")
    assert heads.split() == ["bucket", "packed", "launched", "complete", "exposed"]
    assert [line.split()[0] for line in buckets] == ["0", "1"]
    for line in buckets:
        packed, launched, complete = map(float, line.split()[1:4])
        assert 0 <= packed <= launched <= complete


def _warns_of_a_late_rank(rank):
    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="-1"):
        wrapped.reducer.set_stall_report_after(datetime.timedelta(seconds=-1))
    wrapped.reducer.set_stall_report_after(datetime.timedelta(seconds=0.2))
    store = dist.distributed_c10d._get_default_store()
    loss = wrapped(torch.ones(1, 3)).sum()
    if rank == 1:
        store.wait(["told"], datetime.timedelta(seconds=60))
        loss.backward()
        return None
    with tempfile.NamedTemporaryFile("r") as warnings:
        os.dup2(os.open(warnings.name, os.O_WRONLY | os.O_APPEND), 2)

        def wait_for_report():
            while "rank 1" not in pathlib.Path(warnings.name).read_text():
                time.sleep(0.01)
            store.set("told", "")

        waiting = threading.Thread(target=wait_for_report)
        waiting.start()
        loss.backward()
        waiting.join()
        return warnings.read()


def test_a_rank_that_keeps_others_waiting_is_named():
    assert "for its peers" in run_ranks(_warns_of_a_late_rank)[0]
