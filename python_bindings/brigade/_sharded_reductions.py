"""What torch computes of a list of tensors as a whole, of tensors that ranks hold parts of.

Norms, and the search for what is not finite that a GradScaler makes. Collective: all ranks
of the model's group call them, in one order. Of an expert, which other ranks have another
one of, the norm is that of all of them together, so that a total counts each once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from brigade._shard_place import place_of

# torch calls them with a tensor, the last with a list.
_NORMS = (
    torch.norm,
    torch.Tensor.norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    torch._foreach_norm,
)


def _norm(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The norm of a whole tensor, or of each in a list, from all ranks' parts. Collective."""
    is_list = func is torch._foreach_norm
    parts = list(args[0]) if is_list else [args[0]]
    p = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    p = 2.0 if p is None or p == "fro" else float(p)
    others = [*args[2:]]
    others += [kwargs[name] for name in kwargs if name not in ("ord", "p", "dtype")]
    if p <= 0 or any(other is not None and other is not False for other in others):
        raise NotImplementedError(
            f"a norm of sharded parameters: expected the norm of all elements for p > 0, "
            f"found p = {p} and other arguments.\nTake it of the whole parameters, "
            "inside of unshard()."
        )
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        raise NotImplementedError(
            "a norm of sharded parameters has no gradient.\nTake it under no_grad, or of the "
            "whole parameters inside of forward."
        )
    root = _root_of(parts)
    takes_largest = p == float("inf")
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        norms = [
            torch.linalg.vector_norm(part, p, dtype=torch.float64)
            if part.numel()
            else torch.zeros((), dtype=torch.float64)
            for part in parts
        ]
        values = torch.stack(norms)
        is_counted_elsewhere = [
            not root.native.is_first_replica(place_of(part).unit().index) for part in parts
        ]
        values.masked_fill_(torch.tensor(is_counted_elsewhere), 0)
        if not takes_largest:
            values.pow_(p)
        root.native.sum_over_ranks(values, takes_largest)
        if not takes_largest:
            values.pow_(1 / p)
        dtype = kwargs.get("dtype") or parts[0].dtype
        found = list(values.to(dtype).unbind())
    return found if is_list else found[0]


def _root_of(parts: list[torch.Tensor]) -> Any:
    """The one that all of them belong to."""
    places = [place_of(part) for part in parts]
    units = [None if place is None else place.unit() for place in places]
    roots = {unit.require_root() for unit in units if unit is not None}
    if len(roots) != 1 or None in units:
        raise NotImplementedError(
            "norms of sharded tensors together with others: they are local for the one, and "
            "global for the other.\nTake them apart."
        )
    return roots.pop()


def _unscale(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Of gradients of a model; what any rank finds, all have found."""
    gradients, found_inf = args[0], args[1]
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        func(*args, **kwargs)
        places = [place_of(gradient) for gradient in gradients]
        roots = {place.unit().require_root(): None for place in places if place is not None}
        for root in roots:  # in the order of the gradients, as on all ranks
            found = found_inf.reshape(1).double()
            root.native.sum_over_ranks(found, True)
            found_inf.copy_(found.reshape(found_inf.shape))


# By function of torch: what takes its place.
OF_WHOLE_TENSORS: dict[Callable, Callable[[Callable, tuple, dict[str, Any]], Any]] = {
    **dict.fromkeys(_NORMS, _norm),
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
