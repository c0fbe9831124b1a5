"""torch.compile settings for DistributedDataParallel and fully_shard."""

from __future__ import annotations

import functools

import torch


def reduces_in_compiled_backward() -> bool:
    """Returns True if torch._dynamo.config.optimize_ddp is "python_reducer"."""
    return torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer"


@functools.cache
def leave_to_interpreter() -> None:
    """Excludes this package's functions from tracing; the wrapped module is still compiled.

    torch.compiler.disable() would be slower: Dynamo evaluates a disabled function again in each
    step, with all functions that it calls.
    """
    torch._dynamo.trace_rules.add(__package__)


def reduce_in_compiled_backward(bucket_cap_mb: int) -> None:
    """Lets the compiler fuse all-reduces up to this size, and trace torch's wrapper."""
    torch._inductor.config._fuse_ddp_communication = True
    torch._inductor.config._fuse_ddp_bucket_size = bucket_cap_mb
    rules = torch._dynamo.trace_rules
    rules.LEGACY_MOD_INLINELIST.add("torch.nn.parallel.distributed")
    rules.get_legacy_mod_inlinelist.cache_clear()
