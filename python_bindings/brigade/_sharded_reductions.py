"""What torch computes of a list of tensors as a whole, of tensors that ranks hold parts of.

Norms, sums, means, largest and smallest elements, dot products, and the search for what is
not finite that a GradScaler makes. Collective: all ranks of the model's group call them, in
one order. Of an expert, which other ranks have another one of, each is that of all of them
together, so that a total counts each once.

What is computed element by element is a part too (_sharded_elements.py), and so are sums of
that those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree
from torch import nn

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
    if are_whole(parts):
        return _of_these(func, args, kwargs)
    p = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    asks_by_order = func is torch.linalg.norm and (len(args) > 1 or "ord" in kwargs)
    is_of_matrix = asks_by_order and p not in (None, "fro")
    if p == "nuc" or (is_of_matrix and any(part.dim() > 1 for part in parts)):
        raise NotImplementedError(
            f"a norm of sharded parameters: expected that of all elements, found that of a matrix, "
            f"of order {p}.\nTake torch.linalg.vector_norm() for the first, and full_tensor() for "
            "the second."
        )
    p = 2.0 if p is None or p == "fro" else float(p)
    others = [*args[2:]]
    others += [kwargs[name] for name in kwargs if name not in ("ord", "p", "dtype")]
    if p <= 0 or any(other is not None and other is not False for other in others):
        raise NotImplementedError(
            f"a norm of sharded parameters: expected the norm of all elements for p > 0, "
            f"found p = {p} and other arguments.\nTake it of the whole parameters, "
            "inside of unshard()."
        )
    _require_number("a norm", parts, takes_complex=True)
    takes_largest = p == float("inf")
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        norms = [
            torch.linalg.vector_norm(
                part.abs() if part.is_complex() else part, p, dtype=torch.float64
            )
            if part.numel()
            else part.new_zeros((), dtype=torch.float64)
            for part in parts
        ]
        device = norms[0].device
        values = torch.stack([norm.to(device) for norm in norms]).cpu()
        if not takes_largest:
            values.pow_(p)
        _over_ranks(parts, values, takes_largest, nothing=0)
        if not takes_largest:
            values.pow_(1 / p)
        dtype = (kwargs.get("dtype") or parts[0].dtype).to_real()
        each = values.to(device, dtype).unbind()
        found = [value.to(part.device) for value, part in zip(each, parts, strict=True)]
    return found if is_list else found[0]


def _over_ranks(
    parts: list[torch.Tensor], values: torch.Tensor, takes_largest: bool, nothing: float
) -> None:
    """Sums, or largest, of all ranks' `values`, one for each part, each counted once."""
    root = _root_of(parts)
    is_counted_elsewhere = [
        not root.native.is_first_replica(place_of(part).require_unit().index) for part in parts
    ]
    values.masked_fill_(torch.tensor(is_counted_elsewhere, device="cpu"), nothing)
    root.native.sum_over_ranks(values, takes_largest)


# Of all elements: what is computed here of some, and whether the largest of all ranks' counts.
_TOTALS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "sum": (torch.sum, False),
    "mean": (torch.sum, False),
    "max": (torch.max, True),
    "amax": (torch.max, True),
    "min": (lambda elements: -torch.min(elements), True),
    "amin": (lambda elements: -torch.min(elements), True),
    "any": (lambda elements: torch.max(elements.ne(0).double()), True),
    "all": (lambda elements: -torch.min(elements.ne(0).double()), True),
}
_NEGATED = ("min", "amin", "all")


def _total(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Of one tensor; of two, the larger elements are this rank's, as of other functions."""
    name = func.__name__
    others = [*args[1:], *(kwargs[key] for key in kwargs if key not in ("input", "dtype"))]
    part = args[0] if args else kwargs["input"]
    if any(isinstance(other, torch.Tensor) for other in others) or are_whole([part]):
        return _of_these(func, args, kwargs)
    if others:
        raise NotImplementedError(
            f"{name}() of a sharded parameter: expected that of all elements, found other "
            "arguments.\nTake it of the whole parameters, inside of whole_parameters()."
        )
    _require_number(f"{name}()", [part])
    of_some, takes_largest = _TOTALS[name]
    nothing = -float("inf") if takes_largest and name != "any" else 0.0
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        elements = part.double()
        value = of_some(elements) if part.numel() else elements.new_tensor(nothing)
        values = value.reshape(1).cpu()
        _over_ranks([part], values, takes_largest, nothing)
        if name in _NEGATED:
            values.neg_()
        if name == "mean":
            values /= part._brigade_place.whole_shape.numel()
        return values[0].to(kwargs.get("dtype") or _dtype_of(name, part)).to(part.device)


def _dtype_of(name: str, part: torch.Tensor) -> torch.dtype:
    if name in ("all", "any"):
        return torch.bool
    counts = name == "sum" and not part.is_floating_point() and not part.is_complex()
    return torch.int64 if counts else part.dtype


def _refuse_list(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if are_whole(list(args[0])):
        return _of_these(func, args, kwargs)
    raise NotImplementedError(
        f"{func.__name__}() of sharded parameters.\nTake each one's max(), or sum(), which is the "
        "whole's."
    )


def _dot(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Of two parts of one parameter: of the whole ones."""
    first, second = args[:2]
    if are_whole([first, second]):
        return _of_these(func, args, kwargs)
    place = place_of(first)
    if place is None or place is not place_of(second):
        raise NotImplementedError(
            f"{func.__name__}() of a sharded parameter: expected two parts of one parameter, "
            "found another tensor.\nTake plain() of both, for this rank's elements."
        )
    _require_number(f"{func.__name__}()", [first, second])
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        values = torch.dot(first.double().flatten(), second.double().flatten()).reshape(1).cpu()
        _over_ranks([first], values, takes_largest=False, nothing=0)
        return values[0].to(first.dtype).to(first.device)


def are_whole(parts: list[torch.Tensor]) -> bool:
    """All ranks have the same ones, whole, as replicas are, or they are no parts."""
    return all(
        place is None or _is_everywhere(place.require_unit()) for place in map(place_of, parts)
    )


def _is_everywhere(unit: Any) -> bool:
    """An expert's ranks are some of the model's, whose others have another one."""
    return unit.num_shards == 1 and unit.group.size() == unit.outermost().group.size()


def _of_these(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _require_number(what: str, parts: list[torch.Tensor], takes_complex: bool = False) -> None:
    """NotImplementedError unless it is to be a number, and a real one."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        raise NotImplementedError(
            f"{what} of sharded parameters has no gradient.\nTake it under no_grad, or of the "
            "whole parameters inside of forward."
        )
    if not takes_complex and any(part.is_complex() for part in parts):
        raise NotImplementedError(
            f"{what} of sharded parameters: expected real numbers, found {parts[0].dtype}.\n"
            "Take it of the whole parameters, inside of whole_parameters()."
        )


def _root_of(parts: list[torch.Tensor]) -> Any:
    """The one that all of them belong to."""
    places = [place_of(part) for part in parts]
    units = [None if place is None else place.require_unit() for place in places]
    roots = {unit.require_root() for unit in units if unit is not None}
    if len(roots) != 1 or None in units:
        raise NotImplementedError(
            "norms or sums of sharded tensors together with others: they are local for the one, "
            "and global for the other.\nTake them apart."
        )
    return roots.pop()


def _unscale(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Of gradients of a model; what any rank finds, all have found."""
    gradients, found_inf = args[0], args[1]
    places = [place_of(gradient) for gradient in gradients]
    roots = {place.require_unit().require_root(): None for place in places if place}
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        func(*args, **kwargs)
        for root in roots:  # in the order of the gradients, as on all ranks
            found = found_inf.reshape(1).double()
            root.native.sum_over_ranks(found, True)
            found_inf.copy_(found.reshape(found_inf.shape))


_OF_SEVERAL_ELEMENTS = """
    __array__ __bool__ __complex__ __dlpack__ __float__ __index__ __int__ __iter__ __matmul__
    __rmatmul__ addmm addmv allclose aminmax argmax argmin argsort baddbmm bincount bmm
    cat concat concatenate corrcoef cosine_similarity count_nonzero cov cummax cummin cumprod
    cumsum diff dist einsum fill_diagonal_ histc histogram hstack index_add_ index_copy_ index_fill_
    index_put_ index_reduce_ inner is_nonzero item kron kthvalue log_softmax logcumsumexp logsumexp
    masked_scatter_ matmul median mm mode msort mv nanmean nanmedian nanquantile nansum nonzero
    numpy outer prod put_ quantile renorm renorm_ scatter_ scatter_add_ scatter_reduce_ softmax
    sort squeeze_ stack
    std std_mean swapaxes_ swapdims_ t_ tensordot tolist topk transpose_ trapezoid tril_ triu_
    unbind unique unique_consecutive unsqueeze_ var var_mean vstack
"""


def _refuse_several(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Of a part it would be another one on each rank, and say nothing."""
    operands = torch.utils._pytree.tree_leaves((args, kwargs))
    parts = [each for each in operands if isinstance(each, torch.Tensor) and place_of(each)]
    if are_whole(parts):
        return _of_these(func, args, kwargs)
    raise _refusal(func, parts[0])


def _refusal(func: Callable, part: torch.Tensor) -> NotImplementedError:
    name = func.__name__
    if name in ("__get__", "__set__"):  # of a property, as T
        name = func.__self__.__name__
    place = place_of(part)
    unit = place.unit()
    of_unit = "" if unit is None else f" of {unit.describe()}"
    return NotImplementedError(
        f"{name}() of a sharded tensor of {tuple(place.whole_shape)}{of_unit}: it would be of this "
        "rank's part.\nTake it of full_tensor(), which all ranks call, or of plain(), which is "
        "this part."
    )


def require_whole(
    func: Callable, args: tuple, kwargs: dict[str, Any], cause: Exception | None = None
) -> None:
    """Raises NotImplementedError if a part that is less than all is among the arguments."""
    operands = torch.utils._pytree.tree_leaves((args, kwargs))
    parts = [each for each in operands if isinstance(each, torch.Tensor) and place_of(each)]
    if all(place_of(part).unit() is not None for part in parts) and not are_whole(parts):
        raise _refusal(func, parts[0]) from cause


def _write_by_index(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Of all elements, or of those in a mask; rows have other places in each rank's part."""
    written, index = args[:2]
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
    is_all = index is Ellipsis or (isinstance(index, slice) and index == slice(None))
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    parts = [each for each in tensors if place_of(each) is not None]
    others = [index] if is_mask else tensors  # what a mask's elements become is as many as they
    with torch._C.DisableTorchFunctionSubclass():
        fit = all(each.numel() == 1 or each.shape == written.shape for each in others)
    if (fit and (is_mask or is_all)) or are_whole(parts):
        return _of_these(func, args, kwargs)
    raise _refusal(func, parts[0])


# By function of torch: what takes its place.
OF_WHOLE_TENSORS: dict[Callable, Callable[[Callable, tuple, dict[str, Any]], Any]] = {
    **{
        getattr(owner, name): _refuse_several
        for owner in (torch, torch.Tensor)
        for name in _OF_SEVERAL_ELEMENTS.split()
        if hasattr(owner, name)
    },
    **{
        getattr(nn.functional, name): _refuse_several
        for name in (
            "huber_loss",
            "l1_loss",
            "log_softmax",
            "mse_loss",
            "smooth_l1_loss",
            "softmax",
        )
    },
    **dict.fromkeys(_NORMS, _norm),
    torch.Tensor.__setitem__: _write_by_index,
    **{getattr(owner, name): _total for owner in (torch, torch.Tensor) for name in _TOTALS},
    **{getattr(owner, name): _dot for owner in (torch, torch.Tensor) for name in ("dot", "vdot")},
    **{
        getattr(torch, name): _refuse_list
        for name in ("_foreach_max", "_foreach_powsum")
        if hasattr(torch, name)
    },
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
