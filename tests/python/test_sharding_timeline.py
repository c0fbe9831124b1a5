"""Times of all-gathers and reductions of units, and their ranks."""

import json

import pytest

from ranks import on_ranks
from sharded_training import batch_of, make_net, shard_blocks


@on_ranks()
def test_the_timeline_has_a_steps_gathers_and_reductions(rank):
    model = shard_blocks(make_net())
    for step in range(3):
        model(batch_of(rank, step)).square().mean().backward()
    timeline = model.sharding_timeline()
    assert timeline.iteration == 3
    blocks = [f"blocks.{i}" for i in range(3)]
    gathers = [(gather.unit, gather.is_in_forward) for gather in timeline.gathers]
    assert gathers[:4] == [(unit, True) for unit in ["", *blocks]]
    assert gathers[4:] == [(unit, False) for unit in reversed(blocks)]
    for gather in timeline.gathers:
        assert 0 < gather.launch_ns < gather.complete_ns
        assert 0 <= gather.exposed_ns <= gather.complete_ns - gather.launch_ns
    assert sorted(reduction.unit for reduction in timeline.reductions) == ["", *blocks]
    for i, reduction in enumerate(timeline.reductions):
        assert timeline.backward_begin_ns <= reduction.launch_ns < reduction.complete_ns
        assert 0 <= timeline.exposed_ns(i) <= reduction.complete_ns - reduction.launch_ns
    table = str(timeline)
    assert table.startswith("step 3: compute ")
    assert table.count("  blocks.1\n") == 3

    trace = json.loads(timeline.chrome_trace(rank))
    assert trace["distributedInfo"] == {"rank": rank}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in events} > {"forward", "backward", "finalize"}
    all_gathers = [e["args"] for e in events if e["name"].startswith("ncclKernel_AllGather ")]
    assert [each["unit"] for each in all_gathers] == [unit for unit, _ in gathers]
    scatters = [e["args"] for e in events if e["name"].startswith("ncclKernel_ReduceScatter ")]
    assert [each["unit"] for each in scatters] == [each.unit for each in timeline.reductions]
    assert min(each["bytes"] for each in all_gathers + scatters) > 0

    model.set_timeline_sample_rate(0)
    model(batch_of(rank, 3)).square().mean().backward()
    assert model.sharding_timeline().iteration == 3
    with pytest.raises(ValueError, match="sample rate >= 0"):
        model.set_timeline_sample_rate(-1)
