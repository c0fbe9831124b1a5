"""Random programs that mix what people do in a step: averages are exact, errors are everybody's.

More seeds by hand: PYTHONPATH=build/release/python python tests/python/test_scenario_fuzz.py
--seeds 200 --ranks 3
"""

from __future__ import annotations

import argparse
import collections
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from exact_training import UserError
from random_scenarios import STEPS, Doubling, Parts, Scenario, Step, draw_scenario, weights_of
from ranks import run_ranks
from training import CLASSES

LOCAL = 10  # numbers of forwards whose backward is under no_sync
SECOND = 4.0  # times the rank's place: the second wrapper's input


class Program:
    """A scenario on one rank."""

    def __init__(self, scenario: Scenario, rank: int, kind: str) -> None:
        self.scenario = scenario
        self.rank = rank
        self.ranks = range(dist.get_world_size())
        self.model = Parts(scenario.sizes, scenario.frozen)
        self.wrapped = CLASSES[kind](self.model, **scenario.options)
        self.second = CLASSES[kind](Doubling(), find_unused_parameters=True)
        if scenario.hook:
            self.wrapped.register_comm_hook(None, default_hooks.allreduce_hook)

    def run(self, step: Step) -> None:
        for wrapped in (self.wrapped, self.second):
            wrapped.zero_grad(set_to_none=step.set_to_none)
        if step.failing is None:
            self._backward(step)
            self._expect_averages(step)
            return
        own = step.failing == self.rank
        with pytest.raises(UserError if own else dist.DistBackendError) as caught:
            self._backward(step)
        if not own:
            assert f"rank {step.failing} failed" in str(caught.value), caught.value
        assert self.wrapped.reducer.can_continue()

    def _backward(self, step: Step) -> None:
        before, between, behind = step.extra_forwards[self.rank]
        self._forwards_only(step, before)
        for number in range(step.local_steps):
            with self.wrapped.no_sync():
                self._forward(step, LOCAL + number).backward()
        losses = []
        for number, way in enumerate(step.orders[self.rank]):
            if way == "n":
                with torch.no_grad():
                    self._forward(step, number)
                continue
            with self._raising(step, number):
                if way == "l":
                    with self.wrapped.no_sync():
                        losses.append(self._forward(step, number))
                else:
                    losses.append(self._forward(step, number))
        self._forwards_only(step, between)
        loss = self._with_second(step, sum(losses))
        handle = self._raise_at_parameter(step)
        try:
            loss.backward()
        finally:
            if handle is not None:
                handle.remove()
        self._forwards_only(step, behind)

    def _forward(self, step: Step, number: int) -> torch.Tensor:
        weights = weights_of(self.scenario, step, self.rank, number)
        return self.wrapped(weights, step.with_collective)

    def _forwards_only(self, step: Step, times: int) -> None:
        for _ in range(times):
            weights = weights_of(self.scenario, step, self.rank, 0)
            self.wrapped(weights, step.with_collective).item()

    def _with_second(self, step: Step, loss: torch.Tensor) -> torch.Tensor:
        self.second.requires_grad_(step.second != "frozen")
        if step.second == "same_backward":
            return loss + self.second(torch.tensor([SECOND * (self.rank * self.rank + 1)]))
        if step.second == "frozen":
            doubled = self.second(loss)
            return doubled if self.rank in step.judged else loss
        return loss

    # ------------------------------------------------------------------ failures

    def _raising(self, step: Step, number: int):
        is_last = number == step.orders[self.rank].rindex("s")
        at_begin = step.failing == self.rank and step.fails_at < 0 and is_last
        return _Raises(self.model if at_begin else None)

    def _raise_at_parameter(self, step: Step):
        if step.failing != self.rank or step.fails_at < 0:
            return None
        return self.model.parts[step.fails_at].register_hook(_raise)

    # --------------------------------------------------------------- expectations

    def _expect_averages(self, step: Step) -> None:
        of_ranks = [self._own_gradients(step, rank) for rank in self.ranks]
        for i, part in enumerate(self.model.parts):
            terms = [gradients[i] for gradients in of_ranks if gradients[i] is not None]
            if i in self.scenario.frozen:
                assert part.grad is None
            elif not terms:
                assert part.grad is None or not part.grad.any(), (i, part.grad)
            else:
                average = sum(terms) / len(self.ranks)
                assert torch.equal(part.grad, average), (i, part.grad, average)
        if step.second == "same_backward":
            average = sum(SECOND * (rank * rank + 1) for rank in self.ranks) / len(self.ranks)
            right = torch.tensor([average])
        else:
            right = torch.zeros(1)
        for parameter in self.second.module.parameters():
            gradient = torch.zeros(1) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradient, right, rtol=1e-6, atol=0)

    def _own_gradients(self, step: Step, rank: int) -> list[torch.Tensor | None]:
        doubled = 2 if step.second == "frozen" and rank in step.judged else 1
        numbers = [n for n, way in enumerate(step.orders[rank]) if way != "n"]
        terms = [(doubled, number) for number in numbers]
        terms += [(1, LOCAL + number) for number in range(step.local_steps)]
        gradients: list[torch.Tensor | None] = []
        for i in range(len(self.scenario.sizes)):
            if i in step.left_out[rank]:
                gradients.append(None)
                continue
            total = 0
            for factor, number in terms:
                if i == 0 and step.with_collective:
                    factor = self._sum_of_factors(step, number, factor)
                total = total + factor * weights_of(self.scenario, step, rank, number)[i]
            gradients.append(total)
        return gradients

    def _sum_of_factors(self, step: Step, number: int, own: int) -> int:
        """What the collective makes of the gradients that reach it."""
        if number >= LOCAL or step.second != "frozen":
            return own * len(self.ranks)
        return sum(2 if rank in step.judged else 1 for rank in self.ranks)


def _raise(gradient):
    raise UserError("at a random place")


class _Raises:
    """Lets the backward of a model's outputs raise before any parameter's gradient."""

    def __init__(self, model: Parts | None) -> None:
        self._model = model

    def __enter__(self) -> None:
        if self._model is not None:
            self._model.raises = _raise

    def __exit__(self, *error: object) -> None:
        if self._model is not None:
            self._model.raises = None


def _torch_trains(scenario: Scenario, step: Step) -> bool:
    """Whether its class stays with its peers, and asserts nothing about itself."""
    if scenario.mode == "static_graph" and step.local_steps:
        return False
    return step.failing is None and not any(map(any, step.extra_forwards))


def _run(rank: int, scenario: Scenario, kind: str) -> None:
    program = Program(scenario, rank, kind)
    for i, step in enumerate(scenario.steps):
        if kind == "torch" and not _torch_trains(scenario, step):
            continue
        try:
            program.run(step)
        except BaseException as error:
            raise AssertionError(f"step {i} of {STEPS}, {step}: {error!r}") from error


def _seen_in(scenario: Scenario) -> collections.Counter[str]:
    seen = collections.Counter([scenario.mode])
    seen["views"] = bool(scenario.options["gradient_as_bucket_view"])
    for step in scenario.steps:
        seen[step.second] += 1
        seen["collective"] += step.with_collective
        seen["uneven"] += len(set(step.orders)) > 1 or len(set(step.extra_forwards)) > 1
        seen["no_sync"] += "l" in step.orders[0]
        seen["left out"] += any(step.left_out)
        seen["failing"] += step.failing is not None
    return seen


def _fuzz(rank: int, seeds: list[int], kind: str) -> collections.Counter[str]:
    seen: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        scenario = draw_scenario(seed, dist.get_world_size())
        try:
            _run(rank, scenario, kind)
        except Exception as error:
            steps = dict(vars(scenario), steps="...")
            raise AssertionError(f"{kind}, seed {seed}, {steps}: {error}") from error
        seen += _seen_in(scenario)
    return seen


@pytest.mark.parametrize(("world_size", "seeds"), [(2, range(28)), (3, range(28, 40))])
@pytest.mark.parametrize("kind", CLASSES)
def test_random_programs_are_exact(kind, world_size, seeds):
    seen = run_ranks(_fuzz, list(seeds), kind, world_size=world_size, timeout_s=30)
    expected = {"plain", "find_unused", "static_graph", "same_backward", "frozen", "collective"}
    expected |= {"uneven", "no_sync", "left out", "failing", "views"}
    assert {name for name, times in seen[0].items() if times} >= expected, seen[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kind", choices=CLASSES, default="brigade")
    arguments = parser.parse_args()
    begin = time.monotonic()
    seeds = list(range(arguments.first, arguments.first + arguments.seeds))
    seen = run_ranks(_fuzz, seeds, arguments.kind, world_size=arguments.ranks, timeout_s=30)
    print(f"{len(seeds)} seeds in {time.monotonic() - begin:.1f} s: {dict(seen[0])}")


if __name__ == "__main__":
    main()
