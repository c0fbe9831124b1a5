"""Gives all ranks the state of one rank's optimizer.

    brigade.broadcast_optimizer_state(optimizer)

Ranks that took part in other steps than their peers (a join of uneven inputs, a rank that
came later) have other moments and step counts, and drift apart without it. Learning rate
schedulers have a state of their own, which is not touched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map, tree_map_with_path

from brigade._C import describe_tensor, require_agreement
from brigade._device_moves import device_of

_CHUNK_BYTES = 250 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class _Form:
    """Stands for a tensor, whose values travel by themselves."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_on_cpu: bool  # else where its parameter is

    @staticmethod
    def of(tensor: torch.Tensor) -> _Form:
        stride = torch.empty_like(tensor, device="meta").stride()  # of no overlapping elements
        return _Form(tuple(tensor.size()), stride, tensor.dtype, tensor.device.type == "cpu")

    def make(self, own: object, beside: torch.device) -> torch.Tensor:
        """`own` if it is of this form, else a new tensor."""
        device = torch.device("cpu") if self.is_on_cpu else beside
        fits = type(own) is torch.Tensor and _Form.of(own) == self and own.device == device
        if fits and own.stride() == self.stride:
            return own
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@torch.no_grad()
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    process_group: dist.ProcessGroup | None = None,
    src: int = 0,
) -> None:
    """Makes state and options of `optimizer` those of one rank, bit for bit.

    Collective. Tensors of the same form stay the tensors that they are, with other values.

    Args:
        optimizer: Has the same parameters in the same groups on every rank, and holds the state
            of all of them; its own state may be empty, or of another step.
        process_group: Default: the default group.
        src: The rank within the group whose state is taken.

    Raises:
        RuntimeError: The optimizers of two ranks have other parameters.
        TypeError: Each rank holds another part of the state.
        ValueError: There is no rank `src`.
    """
    group = dist.distributed_c10d._get_default_group() if process_group is None else process_group
    if not 0 <= src < group.size():
        raise ValueError(
            f"broadcast_optimizer_state: src must be a rank of the group, below {group.size()}, "
            f"got {src}.\nGive its rank within the group."
        )
    if hasattr(optimizer, "consolidate_state_dict"):
        raise TypeError(
            "broadcast_optimizer_state: every rank must hold the state of all parameters, but "
            f"{type(optimizer).__name__} has a part on each.\n"
            "Leave it as it is: each part is updated by its owner alone."
        )
    parameters = _require_same_parameters(group, optimizer)
    values = _values_of(optimizer, parameters)
    forms = None
    if group.rank() == src:
        forms = tree_map(lambda v: _Form.of(v) if isinstance(v, torch.Tensor) else v, values)
    objects = [forms]
    dist.broadcast_object_list(objects, group=group, group_src=src)
    if group.rank() != src:
        values = _made_of(objects[0], values, parameters)
    _broadcast_bits((v for v in tree_leaves(values) if isinstance(v, torch.Tensor)), group, src)
    if group.rank() != src:
        _adopt(optimizer, parameters, values)


def _require_same_parameters(
    group: dist.ProcessGroup, optimizer: torch.optim.Optimizer
) -> list[torch.Tensor]:
    descriptions = [
        describe_tensor(f"{i} of group {g}", parameter)
        for g, options in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(options["params"])
    ]
    require_agreement(group, "parameter of the optimizer", descriptions)
    return [parameter for options in optimizer.param_groups for parameter in options["params"]]


def _values_of(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> dict[str, Any]:
    return {
        "by_parameter": [optimizer.state.get(parameter) for parameter in parameters],
        "other": {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)},
        "options": [
            {name: value for name, value in options.items() if name != "params"}
            for options in optimizer.param_groups
        ],
    }


def _made_of(forms: Any, own: Any, parameters: list[torch.Tensor]) -> Any:
    """`forms` with tensors in their places: this rank's own ones, where they fit."""
    own_by_path = dict(tree_flatten_with_path(own)[0])

    def make(path: tuple[Any, ...], form: Any) -> Any:
        if not isinstance(form, _Form):
            return form
        parameter = parameters[path[1].idx if path[0].key == "by_parameter" else 0]
        return form.make(own_by_path.get(path), parameter.device)

    return tree_map_with_path(make, forms)


def _broadcast_bits(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, src: int) -> None:
    """As bytes, since not every backend knows every dtype."""
    of_group = {device.type for device in group._device_types}
    fallback = device_of(group)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        device = tensor.device if tensor.device.type in of_group else fallback
        by_device.setdefault(device, []).append(tensor)
    for device, together in by_device.items():
        sent = [t.contiguous().view(-1).view(torch.uint8).to(device) for t in together]
        dist._broadcast_coalesced(group, sent, _CHUNK_BYTES, src)
        if group.rank() != src:
            for tensor, bits in zip(together, sent, strict=True):
                tensor.copy_(bits.to(tensor.device).view(tensor.dtype).view(tensor.size()))


def _adopt(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], values: dict[str, Any]
) -> None:
    optimizer.state.clear()
    for parameter, state in zip(parameters, values["by_parameter"], strict=True):
        if state is not None:
            optimizer.state[parameter] = state
    optimizer.state.update(values["other"])
    for own, options in zip(optimizer.param_groups, values["options"], strict=True):
        for name in own.keys() - options.keys() - {"params"}:
            del own[name]
        own.update(options)
