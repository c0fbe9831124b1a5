"""Micro-batches of a step: which units each of them gathers and reduces, in how many bytes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import brigade

from cases import pairwise
from rank_cases import run_cases
from ranks import run_ranks

NUM_BATCHES = 3
# Of the outermost module and its layers. What is sent of each is another decimal digit.
NUMELS = (2, 20, 200, 2000)
KINDS = ("gathers", "sums")


class Weighted(nn.Module):
    """Reads its parameter in backward, too: x w[0] + w[1] + w[2] + ..."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        nn.init.ones_(self.weight[:1])

    def forward(self, x):
        return x * self.weight[0] + self.weight[1:].sum()


class Stack(Weighted):
    def __init__(self) -> None:
        super().__init__(NUMELS[0])
        self.layers = nn.Sequential(*(Weighted(numel) for numel in NUMELS[1:]))

    def forward(self, x):
        return super().forward(self.layers(x))


def _batch_of(rank, batch):
    return torch.tensor(2.0 * (1 + rank + batch))


def _shard(**arguments):
    model = Stack()
    reshards = arguments.pop("reshard_after_forward", None)
    for layer in model.layers:
        brigade.fully_shard(layer, reshard_after_forward=reshards, **arguments)
    brigade.fully_shard(model, **arguments)
    return model, [model, *model.layers]


def _sent(model):
    statistics = model.sharding_statistics()
    return [statistics[f"sent_by_{kind}"] for kind in KINDS]


def _times(num_bytes):
    """How often 1 / 2 of each unit was sent, in float32."""
    times = []
    for numel in NUMELS:
        times.append(num_bytes // (2 * numel) % 10)
        num_bytes -= 2 * numel * times[-1]
    assert num_bytes == 0
    return times


def _step(rank, model, plain, set_up):
    """Micro-batches on all ranks and in one process; by batch, how often units were sent."""
    times = []
    for batch in range(NUM_BATCHES):
        set_up(batch == NUM_BATCHES - 1)
        before = _sent(model)
        model(_batch_of(rank, batch)).backward()
        times.append([_times(b - a) for a, b in zip(before, _sent(model), strict=True)])
    world_size = dist.get_world_size()
    for r in range(world_size):
        for batch in range(NUM_BATCHES):
            plain(_batch_of(r, batch)).div(world_size).backward()
    for net in (model, plain):
        torch.optim.SGD(net.parameters(), lr=1.0).step()
        net.zero_grad()
    state = model.full_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    return times


def _counts(rank, chosen, reshards_after_forward, reshards_after_backward):
    model, units = _shard(reshard_after_forward=reshards_after_forward)
    plain = Stack()

    def set_up(is_last):
        for i in chosen:
            units[i].set_requires_gradient_sync(is_last, recurse=False)
            if not reshards_after_backward:
                units[i].set_reshard_after_backward(is_last, recurse=False)
        model.set_is_last_backward(is_last)

    for _ in range(2):
        for batch, found in enumerate(_step(rank, model, plain, set_up)):
            expected = []
            for i in range(len(NUMELS)):
                stayed = batch > 0 and i in chosen and not reshards_after_backward
                again = reshards_after_forward and i > 0
                is_reduced = batch == NUM_BATCHES - 1 or i not in chosen
                expected.append([(not stayed) + again, int(is_reduced)])
            assert found == [list(each) for each in zip(*expected, strict=True)], (batch, found)


@pairwise(
    reshards_after_backward=[True, False],
    reshards_after_forward=[True, False],
    chosen=[(0, 1, 2, 3), (0,), (1, 2)],
)
def test_units_that_add_up_are_reduced_once(
    chosen, reshards_after_forward, reshards_after_backward
):
    run_ranks(_counts, chosen, reshards_after_forward, reshards_after_backward)


def _counts_of_rows(rank, chosen, synchronizes, reshards_after_forward):
    """`synchronizes`: rows add up in each micro-batch."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    model, units = _shard(mesh=mesh, reshard_after_forward=reshards_after_forward)
    plain = Stack()

    def set_up(is_last):
        for i in chosen:
            if synchronizes:
                units[i].set_requires_all_reduce(is_last, recurse=False)
            else:
                units[i].set_requires_gradient_sync(is_last, recurse=False)

    for _ in range(2):
        for batch, (gathers, sums) in enumerate(_step(rank, model, plain, set_up)):
            assert gathers == [1] + 3 * [1 + reshards_after_forward], (batch, gathers)
            for i, found in enumerate(sums):
                # Over its row, and twice the like of a shard over its column.
                is_reduced = batch == NUM_BATCHES - 1 or i not in chosen
                assert found == (2 if is_reduced else int(synchronizes)), (batch, i)


@pytest.mark.parametrize("synchronizes", [True, False])
@pytest.mark.parametrize("chosen", [(0, 1, 2, 3), (0,), (1, 2)], ids=["all", "outermost", "some"])
def test_rows_of_a_mesh_are_added_up_once(chosen, synchronizes):
    cases = [(chosen, synchronizes, reshards) for reshards in (True, False)]
    run_cases(_counts_of_rows, cases, world_size=4)
