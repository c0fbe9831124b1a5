"""Comm hooks of torch that sharding supports: those that compress gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist


@functools.cache
def _wire_dtypes() -> dict[Any, torch.dtype]:
    # Not where brigade is imported: they import much.
    from torch.distributed.algorithms._comm_hooks import default_hooks as of_shards
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as of_buckets

    return {
        "fp16_compress": torch.float16,
        "bf16_compress": torch.bfloat16,
        of_buckets.fp16_compress_hook: torch.float16,
        of_buckets.bf16_compress_hook: torch.bfloat16,
        of_shards.fp16_compress_hook: torch.float16,
        of_shards.bf16_compress_hook: torch.bfloat16,
        dist.BuiltinCommHookType.FP16_COMPRESS: torch.float16,
    }


def wire_dtype_of(hook: Any) -> torch.dtype:
    """The dtype in which gradients are sent.

    Args:
        hook: One of torch's, by DDP's or FSDP's module, or its name.

    Raises:
        NotImplementedError: Another hook.
    """
    dtype = _wire_dtypes().get(hook)
    if dtype is None:
        name = getattr(hook, "__qualname__", repr(hook))
        raise NotImplementedError(
            f"fully_shard: expected a comm hook that compresses, found {name}.\n"
            "Give 'fp16_compress', 'bf16_compress' or torch's hooks of these names; one of "
            "your own is written in C++ (fsdp/reduction_hook.h)."
        )
    return dtype
