"""Runs the Python blocks of docs/ on two ranks.

A page's blocks form one program, after lines that define the names it uses (my_training.py). A
block with a word after its language is a separate program under torchrun; the word names its fault.
"""

import contextlib
import io
import os
import pathlib
import re
import sys

import pytest

from ranks import run_ranks, torchrun

_TESTS = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(_TESTS / "docs"))

from page_blocks import DOCS, Block, blocks_of, name_of, pages_with  # noqa: E402

_GIVEN = """
import os, signal, sys, threading
from contextlib import nullcontext
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist

import brigade
from my_training import batches, criterion, load, make_net, save

torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
timeout = timedelta(seconds=15)
net = make_net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""
_GROUP = "dist.init_process_group('gloo')\n"
_UNBROKEN = """
model = brigade.DistributedDataParallel(net)
for inputs, targets in batches():
    optimizer.zero_grad()
    criterion(model(inputs), targets).backward()
    optimizer.step()
"""
_SMALL_BUCKETS = _UNBROKEN.replace("(net)", "(net, bucket_cap_mb=0.0001)")
_LEARNT = """
x = torch.randn(256, 8)
before = x.sum(1, keepdim=True).square().mean()
loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
assert loss < before / 4, (loss, before)
print(f"rank {torch.distributed.get_rank()} has learnt", flush=True)
torch.distributed.destroy_process_group()
"""
_END = """
digest = 0
for tensor in net.parameters():
    first = tensor.detach().clone()
    dist.broadcast(first, src=0)
    assert torch.equal(first, tensor), "ranks differ"
    digest = hash((digest, *tensor.flatten().tolist()))
print(f"rank {rank} is through with weights {digest}", flush=True)
dist.destroy_process_group()
"""


def _padded(blocks: list[Block]) -> str:
    """Returns the blocks as one program with the page's line numbers."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def _run(
    folder: pathlib.Path, blocks: list[Block], before: str, after: str, fault: str = ""
) -> str:
    """Runs `before`, the blocks and `after` under torchrun, and returns the output."""
    program = folder / "page.py"
    name = str(blocks[0].page) if blocks else "no page"
    program.write_text(f"{before}exec(compile({_padded(blocks)!r}, {name!r}, 'exec'))\n{after}")
    path = os.pathsep.join([str(_TESTS / "python"), os.environ["PYTHONPATH"]])
    restarts = ["--max-restarts", "1"] if fault == "dies" else []
    environment = {**os.environ, "MY_FAULT": fault, "PYTHONPATH": path}
    return torchrun(*restarts, program, cwd=folder, env=environment)


def _programs(page: str) -> dict[str, list[Block]]:
    """Returns the blocks of each program, by the word after the language."""
    programs: dict[str, list[Block]] = {}
    for block in blocks_of(DOCS / f"{page}.md"):
        if block.language == "python":
            programs.setdefault(block.use, []).append(block)
    return programs


def _weights(output: str) -> str:
    """Returns the final weights. Expects them to be equal on both ranks."""
    found = re.findall(r"rank (\d) is through with weights (-?\d+)", output)
    assert {rank for rank, _ in found} == {"0", "1"}, output
    (weights,) = {weights for _, weights in found}
    return weights


def _run_page(rank: int, page: str, folder: str, fault: str, world_size: int) -> tuple:
    """Runs the page's blocks on a rank with a group. Returns the parameters and the output."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MY_FAULT": fault}
    os.chdir(folder)
    names: dict = {}
    exec(_GIVEN, names)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(_padded(_programs(page)[""]), str(DOCS / f"{page}.md"), "exec"), names)
    return [tensor.tolist() for tensor in names["net"].parameters()], printed.getvalue()


def test_all_blocks_have_a_language_that_a_test_runs():
    # make_cpp.py uses the C++ blocks, use_from_cmake.py the CMake and text blocks.
    elsewhere = {("cpp", ""), ("cmake", ""), ("cmake", "in-tree"), ("text", "")}
    here = {("python", ""), ("python", "torchrun"), ("python", "late"), ("python", "dies")}
    blocks = [block for page in DOCS.rglob("*.md") for block in blocks_of(page) if block.language]
    assert {(block.language, block.use) for block in blocks} == elsewhere | here
    assert {name_of(block.page) for block in blocks if block.language in ("cmake", "text")} == {
        "guides/cmake"
    }


@pytest.mark.parametrize("page", pages_with("python"))
def test_a_page_runs_and_ranks_end_with_equal_parameters(page, tmp_path):
    (first, _), (second, _) = run_ranks(_run_page, page, tmp_path, "", 2)
    assert first == second


def test_a_batch_that_fails_on_one_rank_is_skipped_on_all(tmp_path):
    (first, said), (second, said_too) = run_ranks(
        _run_page, "guides/failures", tmp_path, "raises", 2
    )
    assert first == second
    assert said.startswith("left out on all ranks: Reducer: rank 1 failed in iteration 3")
    assert said.count("left out") == 1
    assert said_too == "left out on all ranks: a bad sample\n"


def _run_unbroken(rank: int) -> list:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    names: dict = {}
    exec(_GIVEN + _SMALL_BUCKETS, names)
    return [tensor.tolist() for tensor in names["net"].parameters()]


def test_resumed_training_has_the_bits_of_uninterrupted_training(tmp_path):
    resumed = run_ranks(_run_page, "guides/checkpoints", tmp_path, "", 3, world_size=3)
    unbroken = run_ranks(_run_unbroken, world_size=3)
    assert [parameters for parameters, _ in resumed] == unbroken


def test_the_programs_of_the_start_page_learn(tmp_path):
    programs = [block for block in blocks_of(DOCS / "start/python.md") if block.use == "torchrun"]
    replicated, sharded = programs
    assert _run(tmp_path, [replicated], "", "").count(": loss 0.0") == 2
    assert _run(tmp_path, [sharded], "", _LEARNT).count("has learnt") == 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["late", "dies"])
def test_training_recovers_from_a_fault_to_the_same_bits(fault, tmp_path):
    blocks = _programs("guides/failures")[fault]
    done = _run(tmp_path, blocks, _GIVEN, _END, fault)
    assert "rank 0, step 2: " in done, done
    unbroken = _run(tmp_path, [], _GIVEN + _GROUP + _UNBROKEN, _END)
    assert _weights(done) == _weights(unbroken)
