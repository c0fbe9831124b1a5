"""Two models of one process, each in a thread and a group of its own, train at once."""

import concurrent.futures
import threading

import torch
import torch.distributed as dist
from torch import nn

from cases import pairwise
from ranks import run_ranks
from training import CLASSES

RUNS = 5  # with new groups each
MODELS = 2
STEPS = 3


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(2))
        self.q = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.p * x).sum() + 2 * (self.q * x).sum()


def _over_a_network_store(rank, world_size):
    """Moves the default group to a store of which each process has one client, with one lock."""
    store = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if not rank else None
    )
    port = [store.port if store else None]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _wrap(kind, group, options):
    return CLASSES[kind](Scale(), process_group=group, bucket_cap_mb=1e-6, **options)


def _train(rank, model, wrapped, others):
    others.wait()
    for step in range(STEPS):
        wrapped.zero_grad()
        xs = [4.0 * (step + 1) + 16 * r + 64 * model for r in range(dist.get_world_size())]
        wrapped(torch.tensor(xs[rank])).backward()
        average = sum(xs) / len(xs)
        assert torch.equal(wrapped.module.p.grad, torch.full((2,), average)), (model, step)
        assert torch.equal(wrapped.module.q.grad, torch.full((3,), 2 * average)), (model, step)


def _two_models(rank, kind, where, options):
    _over_a_network_store(rank, dist.get_world_size())
    for _ in range(RUNS):
        groups = [dist.new_group() for _ in range(MODELS)]
        if where == "constructed_one_by_one":
            models = [_wrap(kind, group, options) for group in groups]
        others = threading.Barrier(MODELS)

        def run(i, groups=groups, others=others):
            if where == "constructed_in_threads":
                models_i = _wrap(kind, groups[i], options)
            else:
                models_i = models[i]  # noqa: B023
            # Ranks come to the models in unlike orders.
            _train(rank, i, models_i, others)

        with concurrent.futures.ThreadPoolExecutor(MODELS) as pool:
            order = range(MODELS) if rank == 0 else reversed(range(MODELS))
            for done in [pool.submit(run, i) for i in order]:
                done.result()
        dist.barrier()


@pairwise(
    mode=["plain", "find_unused_parameters", "static_graph"],
    where=["constructed_one_by_one", "constructed_in_threads"],
    kind=CLASSES,
)
def test_two_models_train_at_once(kind, where, mode):
    options = {} if mode == "plain" else {mode: True}
    run_ranks(_two_models, kind, where, options, timeout_s=30, deadline_s=90)
