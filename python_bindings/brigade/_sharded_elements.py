"""What is computed of parts and is a part again: copies, and whatever goes element by element.

So that `(parameter * 2).norm()` is that of the whole tensor, as `parameter.norm()` is, and
all ranks take one way, whatever the sizes of their parts are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_NAMES = """
    abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and
    bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh
    deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1 fix float_power floor
    floor_divide fmax fmin fmod frac ge greater greater_equal gt hypot isclose isfinite
    isinf isnan isneginf isposinf ldexp le lerp less less_equal lgamma log log10 log1p log2
    logaddexp logical_and logical_not logical_or logical_xor logit lt maximum minimum mul
    multiply nan_to_num ne neg negative nextafter not_equal pow rad2deg real reciprocal relu
    remainder round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub
    subtract tan tanh true_divide trunc where xlogy __abs__ __add__ __and__ __eq__
    __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__ __mod__ __mul__ __ne__ __neg__
    __or__ __pow__ __radd__ __rdiv__ __rfloordiv__ __rmod__ __rmul__ __rpow__ __rsub__
    __rtruediv__ __sub__ __truediv__ __xor__
"""
_COPIES = """
    bfloat16 clone contiguous cpu cuda detach double empty_like float full_like half
    new_empty ones_like pin_memory to type zeros_like
"""
_FLAT = ("flatten", "ravel")  # without arguments; reshape() and view() with -1


def _functions(names: Iterable[str]) -> set[Callable]:
    owners = (torch, torch.Tensor)
    return {getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)}


# Of one tensor's elements they give as many, those of each rank from its own.
OF_ELEMENTS = _functions(_NAMES.split())
COPIES = _functions(_COPIES.split()) | {torch.Tensor.data.__get__}
OF_LISTS = {
    getattr(torch, name)
    for name in dir(torch)
    if name.startswith("_foreach_") and not name.endswith(("_", "_norm", "_max", "_powsum"))
}
_FLATTENING = _functions(_FLAT)
_RESHAPING = _functions(["reshape", "view"])


def flattens(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether all that is asked for is the tensor's elements in one dimension."""
    if func in _FLATTENING:
        return len(args) == 1 and not kwargs
    return func in _RESHAPING and not kwargs and args[1:] in ((-1,), ((-1,),), ([-1],))


def is_in_place(func: Callable) -> bool:
    """By its name, as torch's are."""
    return getattr(func, "__name__", "").endswith("_")
