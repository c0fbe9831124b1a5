"""torch.compile settings for DistributedDataParallel and fully_shard."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


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
    rules.get_torch_obj_rule_map()[apply_hook] = torch._dynamo.variables.UserFunctionVariable


def apply_hook(
    hook: Callable[..., Any], state: object, pair: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Replaces a gradient by the hook's result, and waits for it. The compiler traces this."""
    try:
        result = hook(state, pair)
    except AttributeError as error:
        if not hasattr(torch.distributed.GradBucket, error.name or ""):
            raise
        raise NotImplementedError(
            'DistributedDataParallel: with torch._dynamo.config.optimize_ddp="python_reducer", a '
            "comm hook gets a gradient and its parameter as a tuple, no GradBucket.\nTake both "
            "from the tuple, or set another optimize_ddp before wrapping."
        ) from error
    if isinstance(result, torch._C.Future):
        result = result.wait()
    if result is not None and result is not pair[0]:
        pair[0].copy_(result)
