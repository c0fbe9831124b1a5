"""Stall reports on stderr."""

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

from ranks import run_ranks


def _warns_of_a_late_rank(rank):
    wrapped = brigade.DistributedDataParallel(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="-1"):
        wrapped.reducer.set_stall_report_after(datetime.timedelta(seconds=-1))
    wrapped.reducer.set_stall_report_after(datetime.timedelta(seconds=0.2))
    store = dist.distributed_c10d._get_default_store()
    loss = wrapped(torch.ones(1, 3)).sum()
    if rank == 1:
        store.wait(["reported"], datetime.timedelta(seconds=60))
        loss.backward()
        return None
    with tempfile.NamedTemporaryFile("r") as warnings:
        os.dup2(os.open(warnings.name, os.O_WRONLY | os.O_APPEND), 2)

        def wait_for_report():
            while "rank 1" not in pathlib.Path(warnings.name).read_text():
                time.sleep(0.01)
            store.set("reported", "")

        waiting = threading.Thread(target=wait_for_report)
        waiting.start()
        loss.backward()
        waiting.join()
        return warnings.read()


def test_a_stall_report_names_the_late_rank():
    assert "for its peers" in run_ranks(_warns_of_a_late_rank)[0]
