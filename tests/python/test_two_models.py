"""Two models of one process train at once, each in its own thread and process group."""

import concurrent.futures
import threading

import pytest
import torch.distributed as dist

from exact_training import MODES, Training
from ranks import on_ranks

RUNS = 5  # each with new groups
MODELS = 2


def _over_a_network_store(rank, world_size):
    """Recreates the default group over a store with one client and one lock per process."""
    address = "127.0.0.1"
    store = None if rank else dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    port = [store.port if store else None]
    dist.broadcast_object_list(port)
    dist.barrier()
    dist.destroy_process_group()
    store = store or dist.TCPStore(address, port[0], is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


@pytest.mark.parametrize("in_threads", [False, True])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(timeout_s=30, deadline_s=90)
def test_two_models_train_at_once(rank, in_threads, mode):
    _over_a_network_store(rank, dist.get_world_size())
    for _ in range(RUNS):
        groups = [dist.new_group() for _ in range(MODELS)]
        others = threading.Barrier(MODELS)

        def make(i, groups=groups):
            return Training(rank, {"process_group": groups[i], **MODES[mode]})

        made = [None if in_threads else make(i) for i in range(MODELS)]

        def run(i, made=made, make=make, others=others):
            training = made[i] or make(i)
            others.wait()
            for _ in range(3):
                training.expect_gradients()

        with concurrent.futures.ThreadPoolExecutor(MODELS) as pool:
            order = range(MODELS) if rank == 0 else reversed(range(MODELS))
            for done in [pool.submit(run, i) for i in order]:
                done.result()
        dist.barrier()
