"""Random programs have the bits of one process, and DDP programs those of torch's class.

More seeds by hand: PYTHONPATH=build/release/python python tests/python/test_random_programs.py
Sharded --seeds 200 --ranks 3
"""

from __future__ import annotations

import argparse
import time

import pytest

from random_programs import Replicated, Sharded, run_programs
from ranks import run_ranks

CLASSES = {"Replicated": Replicated, "Sharded": Sharded}
# Ranks differ within a backward, and between backwards.
OF_DDP = {"forwards", "save_and_load", "collective", "same backward", "frozen", "no_sync"}
OF_BRIGADES_DDP = {"fail", "uneven", "left out", "in a thread"}
OFTEN = {action for action, weight in Sharded.actions.items() if weight >= 1}
OF_SHARDING = OFTEN | {"in a thread", "collective", "twice", "together", "one ahead", "clip"}


def _run(make, world_size, seeds, **how):
    seeds = list(seeds)
    seen = run_ranks(run_programs, make, seeds, how, world_size=world_size, timeout_s=30)
    return seen[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_averages(world_size):
    assert _run(Replicated, world_size, range(20)) >= OF_DDP | OF_BRIGADES_DDP


def test_the_reference_equals_torchs_ddp():
    assert _run(Replicated, 2, range(20, 30), kind="torch") >= OF_DDP


def test_ddp_has_torchs_bits():
    _run(Replicated, 2, range(25), against="torch")


@pytest.mark.parametrize(("world_size", "seeds"), [(2, 16), (3, 10), (4, 10)])
def test_sharded_modules_train_as_one_process(world_size, seeds):
    seen = _run(Sharded, world_size, range(100 * world_size, 100 * world_size + seeds))
    assert seen >= (OF_SHARDING if seeds > 10 else OFTEN)


@pytest.mark.slow
@pytest.mark.parametrize("begin", [1000, 2000])
@pytest.mark.parametrize(
    ("world_size", "kind"), [(2, "brigade"), (3, "brigade"), (4, "brigade"), (2, "torch")]
)
def test_more_of_ddp(world_size, kind, begin):
    _run(Replicated, world_size, range(begin, begin + 60), kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("begin", [1000, 1100])
def test_more_bits_of_torchs(begin):
    _run(Replicated, 2, range(begin, begin + 100), against="torch")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("begin", [1000, 1100])
def test_more_of_sharding(world_size, begin):
    _run(Sharded, world_size, range(begin, begin + 60))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=CLASSES)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--against", choices=["plain", "torch"], default="plain")
    arguments = parser.parse_args()
    begin = time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    how = {"against": arguments.against} if arguments.program == "Replicated" else {}
    _run(CLASSES[arguments.program], arguments.ranks, seeds, **how)
    print(f"{len(seeds)} programs in {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
