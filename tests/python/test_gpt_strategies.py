"""The GPT of examples/python, on four ranks, in each of its strategies and one more."""

import importlib.util
import itertools
import pathlib
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import run_ranks

_PATH = pathlib.Path(__file__).parents[2] / "examples" / "python" / "train_gpt.py"

WORLD_SIZE = 4
SIZE, HEADS, BLOCKS = 16, 2, 2
STEPS = 3
OPTIMIZER_STATE_ONLY = "optimizer state"  # docs/sharding.md: ZeRO-1 from Python


def _example():
    """Where there is no package tqdm, without a bar: main() is not called."""
    stands_in = importlib.util.find_spec("tqdm") is None
    if stands_in:
        sys.modules["tqdm"] = types.SimpleNamespace(tqdm=iter)
    spec = importlib.util.spec_from_file_location("train_gpt", _PATH)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        if stands_in:
            del sys.modules["tqdm"]  # others ask whether it is installed
    return module


STRATEGIES = ["full", "grad", "hybrid", "none", OPTIMIZER_STATE_ONLY]


def test_these_are_all_that_the_program_offers():
    assert {*_example().STRATEGIES, OPTIMIZER_STATE_ONLY} == set(STRATEGIES)


def _sharded(gpt, strategy):
    model = gpt.GPT(SIZE, HEADS, BLOCKS)
    if strategy != OPTIMIZER_STATE_ONLY:
        return gpt.sharded(model, strategy)
    gpt.sharded(model, "grad")
    model.set_reshard_after_backward(False)
    model.set_reduce_scatter_max_input_buffers(BLOCKS + 2)
    return model


def _trains(rank, strategy):
    """As the program's main() does; returns what it shows of it."""
    gpt = _example()
    torch.manual_seed(0)
    model = _sharded(gpt, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(rank)
    text = gpt.documentation()
    losses, norms, gathers = [], [], []
    for step in range(STEPS):
        rows = gpt.batch_of(text, step, 2)
        optimizer.zero_grad()
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        losses.append(loss.item())
        gathers.append(model.sharding_statistics()["sent_by_gathers"])
    held = sum(brigade._C.local_of(p).numel() for p in model.parameters())
    return {
        "losses": losses,
        "norms": norms,
        "gathers": [b - a for a, b in itertools.pairwise(gathers)],
        "held": held,
        "weights": gpt.digest(model),
    }


def _trains_in_all(rank):
    return {strategy: _trains(rank, strategy) for strategy in STRATEGIES}


@pytest.fixture(scope="module")
def results():
    of_ranks = run_ranks(_trains_in_all, world_size=WORLD_SIZE)
    return {strategy: [found[strategy] for found in of_ranks] for strategy in STRATEGIES}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_end_with_the_same_weights(strategy, results):
    of_ranks = results[strategy]
    assert len({found["weights"] for found in of_ranks}) == 1
    assert all(found["norms"] == of_ranks[0]["norms"] for found in of_ranks)
    assert len({tuple(found["losses"]) for found in of_ranks}) == WORLD_SIZE  # batches of their own


@pytest.mark.parametrize("strategy", ["grad", "none", OPTIMIZER_STATE_ONLY])
def test_strategies_that_add_up_in_the_order_of_ranks_have_one_result(strategy, results):
    for found, expected in zip(results[strategy], results["full"], strict=True):
        assert found["losses"] == expected["losses"]
        assert found["weights"] == expected["weights"]


def test_rows_and_columns_have_the_result_but_for_rounding(results):
    for found, expected in zip(results["hybrid"], results["full"], strict=True):
        torch.testing.assert_close(found["losses"], expected["losses"])
        torch.testing.assert_close(found["norms"], expected["norms"])


def test_ranks_hold_what_the_strategy_says(results):
    held = {strategy: [found["held"] for found in results[strategy]] for strategy in STRATEGIES}
    whole = held["none"][0]
    assert held["none"] == [whole] * WORLD_SIZE
    for strategy in ("full", "grad", OPTIMIZER_STATE_ONLY):
        assert sum(held[strategy]) == whole, strategy
        assert max(held[strategy]) < whole / 3, strategy
    assert held["hybrid"][0] + held["hybrid"][1] == whole
    assert held["hybrid"][:2] == held["hybrid"][2:]


def test_ranks_send_what_the_strategy_says(results):
    """Of whole parameters, by step: all but this rank's part, twice, once, once and never."""
    sent = {strategy: results[strategy][0]["gathers"] for strategy in STRATEGIES}
    for strategy, of_steps in sent.items():
        assert len(set(of_steps)) == 1, (strategy, of_steps)
    once = sent["grad"][0]
    assert once > 0
    assert sent[OPTIMIZER_STATE_ONLY][0] == once
    assert sent["none"][0] == 0
    assert once < sent["full"][0] <= 2 * once  # what lies around the blocks stays whole


def _accumulates(rank, strategy):
    """Three batches to one step: how often parameters are gathered for them."""
    gpt = _example()
    model = _sharded(gpt, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = gpt.documentation()
    sent = []
    for step in range(3):
        before = model.sharding_statistics()["sent_by_gathers"]
        optimizer.zero_grad()
        for batch in range(3):
            rows = gpt.batch_of(text, 3 * step + batch, 1)
            logits = model(rows[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        sent.append(model.sharding_statistics()["sent_by_gathers"] - before)
    dist.barrier()
    assert isinstance(model, brigade.FSDPModule)
    return sent[-1]


def _accumulates_in_both(rank):
    return {s: _accumulates(rank, s) for s in ("grad", OPTIMIZER_STATE_ONLY)}


def test_three_batches_of_a_step_are_gathered_for_as_often_as_documented():
    sent = run_ranks(_accumulates_in_both)[0]
    assert sent["grad"] == 3 * sent[OPTIMIZER_STATE_ONLY] > 0
