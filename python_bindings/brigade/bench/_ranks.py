"""What the ranks of a sweep say to each other."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Ranks:
    """A group, and the device on which it is spoken to."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device

    def size(self) -> int:
        return self.group.size()

    def synchronize(self) -> None:
        """Waits for what was queued on the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def meet(self) -> None:
        """Returns when all ranks are here."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        self.synchronize()

    def slowest(self, samples: list[float]) -> list[float]:
        """Every sample becomes the largest of all ranks."""
        if not samples:
            return []
        largest = torch.tensor(samples, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.tolist()

    def all_say(self, value: bool) -> bool:
        return self.slowest([0.0 if value else 1.0]) == [0.0]

    def average(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of all ranks' tensors, each divided by their number before it is added."""
        mean = tensor / self.size()
        dist.all_reduce(mean, group=self.group)
        return mean
