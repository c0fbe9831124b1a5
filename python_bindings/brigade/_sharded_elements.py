"""What is computed of parts and is a part again: copies, and whatever goes element by element.

So that `(parameter * 2).norm()` is that of the whole tensor, as `parameter.norm()` is, and
all ranks take one way, whatever the sizes of their parts are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from brigade._shard_place import place_of

_NAMES = """
    abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bernoulli bitwise_and
    bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh
    deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1 fix float_power floor
    floor_divide fmax fmin fmod frac ge greater greater_equal gt hypot isclose isfinite
    isinf isnan isneginf isposinf ldexp le lerp less less_equal lgamma log log10 log1p log2
    logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum
    mul multiply nan_to_num ne neg negative nextafter not_equal pow rad2deg real reciprocal relu
    remainder round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub
    subtract tan tanh true_divide trunc where xlogy __abs__ __add__ __and__ __eq__
    __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__ __mod__ __mul__ __ne__ __neg__
    __or__ __pow__ __radd__ __rdiv__ __rfloordiv__ __rmod__ __rmul__ __rpow__ __rsub__
    __rtruediv__ __sub__ __truediv__ __xor__
"""
_ACTIVATIONS = """
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6
    selu silu softplus softshrink softsign tanhshrink threshold
"""
_COPIES = """
    bfloat16 bool byte char clone contiguous cpu cuda detach double empty_like float full_like half
    int long new_empty ones_like pin_memory rand_like randint_like randn_like short to type type_as
    zeros_like
"""
# Of this rank's memory: what is asked for is no more, or is written through.
_MEMORY = """
    new_full new_ones new_tensor new_zeros resolve_conj resolve_neg view_as_complex view_as_real
"""
_FLAT = ("flatten", "ravel")  # without arguments; reshape() and view() with -1


def _functions(names: Iterable[str]) -> set[Callable]:
    owners = (torch, torch.Tensor)
    return {getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)}


# Of one tensor's elements they give as many, those of each rank from its own.
OF_ELEMENTS = _functions(_NAMES.split()) | {
    getattr(nn.functional, name) for name in _ACTIVATIONS.split() if hasattr(nn.functional, name)
}
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


_OF_THIS_RANK = _functions(_MEMORY.split())


def is_of_this_rank(func: Callable) -> bool:
    """Whether it gives, by what it is for, a tensor that is no part."""
    return func in _OF_THIS_RANK


_VIEWS_AS = _functions(["expand_as", "reshape_as", "view_as"])


def is_seen_as_a_part(func: Callable, args: tuple) -> bool:
    """Whether a tensor that is no part is to have the shape of one."""
    return func in _VIEWS_AS and place_of(args[0]) is None


def takes_all(func: Callable, args: tuple) -> bool:
    """Whether it is `tensor[:]`, `tensor[...]`, or a view of the same shape."""
    if func in _VIEWS_AS:
        return place_of(args[0]) is place_of(args[1])
    if func in _RESHAPING:
        asked = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        return place_of(args[0]) is not None and tuple(asked) == tuple(args[0].shape)
    if func is not torch.Tensor.__getitem__:
        return False
    return args[1] is Ellipsis or (isinstance(args[1], slice) and args[1] == slice(None))


_WRITING = re.compile(r"(_foreach_|_fused_|_amp_|[^_]).*[^_]_|__i\w+__|__set\w*__|__del\w*__")
_TELLING = _functions(
    ["backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"]
)


def gives_no_tensor(func: Callable) -> bool:
    """Whether its errors are about what is asked for, and not about parts."""
    return func in _TELLING


@functools.cache  # functions stay
def is_in_place(func: Callable) -> bool:
    """By its name, as torch's are."""
    return _WRITING.fullmatch(getattr(func, "__name__", "")) is not None


def writes_elsewhere(args: tuple, part: type) -> bool:
    """Whether a tensor, or the first of a list, that is no `part` is written."""
    written = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
    return not isinstance(written, part)
