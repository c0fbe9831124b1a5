"""sync_buffers() copies one rank's buffers to all ranks."""

import torch
import torch.distributed as dist
from torch import nn

import brigade

from ranks import on_ranks
from training import Perceptron, inputs, loss_of


@on_ranks()
def test_buffers_become_those_of_one_rank(rank):
    wrapped = brigade.DistributedDataParallel(Perceptron(), forward_sync_buffers=rank < 2)
    loss_of(wrapped(inputs(rank, 1)[0])).backward()
    means = wrapped.module.layers[1].running_mean

    def gathered():
        tensors = [torch.empty_like(means) for _ in range(2)]
        dist.all_gather(tensors, means)
        return tensors

    before = gathered()
    assert not torch.equal(*before)
    wrapped.sync_buffers()
    assert torch.equal(means, before[0])
    means += rank
    before = gathered()
    wrapped.sync_buffers(src=1)
    assert torch.equal(means, before[1])
    brigade.DistributedDataParallel(nn.Linear(2, 2)).sync_buffers()
