"""Settings of torch's compiler for the wrapper's Python."""

from __future__ import annotations

import functools

import torch


def reduces_in_compiled_backward() -> bool:
    """True if the compiler is told to reduce gradients itself, without a C++ reducer."""
    return torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer"


@functools.cache
def leave_to_interpreter() -> None:
    """The compiler neither traces nor converts this package's functions.

    It compiles the module that they call, as it does with torch's own wrapper. A function that
    is merely disabled is looked at again, with all that it calls, in each step.
    """
    torch._dynamo.trace_rules.add(__package__)


def reduce_in_compiled_backward(bucket_cap_mb: int) -> None:
    """The compiler fuses all-reduces up to this size, and looks into torch's wrapper."""
    torch._inductor.config._fuse_ddp_communication = True
    torch._inductor.config._fuse_ddp_bucket_size = bucket_cap_mb
    rules = torch._dynamo.trace_rules
    rules.LEGACY_MOD_INLINELIST.add("torch.nn.parallel.distributed")
    rules.get_legacy_mod_inlinelist.cache_clear()
