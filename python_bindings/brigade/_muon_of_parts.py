"""torch.optim.Muon of matrices that ranks hold parts of.

Its update is made of a whole matrix. So ranks that share some take turns: each puts one
together, of all ranks' parts, makes what torch's Muon makes of it, and hands out the parts
of that. Each matrix is made once, whatever the number of ranks, and travels twice in
bfloat16, which torch's computes in: the bits are those of one process that has all.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from brigade._shard_place import ShardPlace, place_of
from brigade._sharded_tensors import TensorShard

# Of torch's module: what updates parameters, makes a matrix, and scales its step.
_NAMES = ("muon", "_zeropower_via_newtonschulz", "_adjust_lr")


@functools.cache
def teach_muon() -> bool:
    """From here on torch's Muon knows parts. False: this torch's can't be taught."""
    module = getattr(torch.optim, "_muon", None)
    if module is None or not all(hasattr(module, name) for name in _NAMES):
        return False
    of_whole = module.muon

    @functools.wraps(of_whole)
    def muon(
        params: list[Tensor], grads: list[Tensor], muon_momentum_bufs: list[Tensor], **options: Any
    ) -> None:
        lists = (params, grads, muon_momentum_bufs)
        is_part = [_is_part(param) for param in params]
        whole = [list(itertools.compress(each, (not part for part in is_part))) for each in lists]
        of_whole(*whole, **options)
        _step_parts(module, *(list(itertools.compress(each, is_part)) for each in lists), **options)

    module.muon = muon
    return True


def _is_part(tensor: Tensor) -> bool:
    """Of a tensor that several ranks share; all answer alike."""
    place = place_of(tensor)
    return place is not None and place.require_unit().num_shards > 1


def _step_parts(
    module: Any,
    params: list[TensorShard],
    grads: list[TensorShard],
    buffers: list[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    **_: Any,
) -> None:
    """Formulas: torch.optim.Muon's."""
    places = [place_of(param) for param in params]
    updates = []
    for place, grad, buffer in zip(places, grads, buffers, strict=True):
        average, new = _plain(buffer), _plain(grad)
        average.lerp_(new, 1 - momentum)
        update = new.lerp(average, momentum) if nesterov else average
        is_whole = update.shape == place.whole_shape
        updates.append((place.in_memory(update) if is_whole else update).to(torch.bfloat16))

    def orthogonalize(matrix: Tensor) -> Tensor:
        return module._zeropower_via_newtonschulz(matrix, ns_coefficients, ns_steps, eps)

    lr = lr.squeeze() if isinstance(lr, Tensor) else lr
    directions = _by_matrices(places, updates, orthogonalize)
    for param, direction in zip(params, directions, strict=True):
        elements = param.elements()
        elements.mul_(1 - lr * weight_decay)
        rate = module._adjust_lr(lr, adjust_lr_fn, param.whole_shape)
        elements.add_(direction, alpha=-rate)


def _plain(tensor: Tensor) -> Tensor:
    """What was loaded is no part, as far as its type goes."""
    return tensor.plain() if isinstance(tensor, TensorShard) else tensor.detach()


def _by_matrices(
    places: list[ShardPlace], parts: list[Tensor], function: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """This rank's parts of what `function` makes of each whole matrix. Collective."""
    results = dict.fromkeys(range(len(parts)), torch.empty(0))
    by_row: dict[tuple[dist.ProcessGroup, int], list[int]] = {}
    for index, place in enumerate(places):
        unit = place.require_unit()
        by_row.setdefault((unit.group, unit.num_shards), []).append(index)
    for (group, num_shards), indices in by_row.items():
        row = _Row(group, num_shards)
        row.learn_numels([places[i] for i in indices], [parts[i] for i in indices])
        for begin in range(0, len(indices), num_shards):
            batch = indices[begin : begin + num_shards]
            made = row.apply([places[i] for i in batch], [parts[i] for i in batch], function)
            results.update(zip(batch, made, strict=True))
    return list(results.values())


# By rank of its unit's group: how many of its elements it holds.
_numels: weakref.WeakKeyDictionary[ShardPlace, list[int]] = weakref.WeakKeyDictionary()


class _Row:
    """Ranks that hold everything once, among those of a group."""

    def __init__(self, group: dist.ProcessGroup, num_shards: int) -> None:
        rank = dist.get_rank(group)
        self._group = group
        self._rank = rank % num_shards
        self._first = rank - self._rank

    def learn_numels(self, places: list[ShardPlace], parts: list[Tensor]) -> None:
        """Collective where some are new."""
        new = {
            place: part for place, part in zip(places, parts, strict=True) if place not in _numels
        }
        if not new:
            return
        device = parts[0].device
        own = torch.tensor([part.numel() for part in new.values()], device=device)
        by_rank = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(by_rank, own, group=self._group)
        _numels.update(zip(new, torch.stack(by_rank, dim=1).tolist(), strict=True))

    def apply(
        self, places: list[ShardPlace], parts: list[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Of as many matrices as it has ranks, or fewer: the n-th is the n-th rank's."""
        own = [part.numel() for part in parts]
        handed_out = [0] * dist.get_world_size(self._group)
        handed_out[self._first : self._first + len(own)] = own
        put_together = [0] * len(handed_out)
        place = places[self._rank] if self._rank < len(places) else None
        if place is not None:
            row = slice(self._first, self._first + place.require_unit().num_shards)
            put_together[row] = _numels[place][row]
        elements = self._exchange(torch.cat(parts), handed_out, put_together)
        if place is not None:
            matrix = place.from_memory(elements.view(place.shape_in_memory))
            elements = place.in_memory(function(matrix))
        return list(self._exchange(elements, put_together, handed_out).split(own))

    def _exchange(self, sent: Tensor, numels: list[int], to_receive: list[int]) -> Tensor:
        """By rank of the group. As bytes: backends know few types."""
        size = sent.element_size()
        received = sent.new_empty(sum(to_receive))
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [size * numel for numel in to_receive],
            [size * numel for numel in numels],
            group=self._group,
        )
        return received
