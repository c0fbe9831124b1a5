"""What fully_shard asks of a parameter and its module, so that training is not silently wrong."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor


def require_plain(parameter: nn.Parameter, where: str) -> None:
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"fully_shard: parameter {where} is a DTensor, split over a mesh of its own.\nShard "
            "plain tensors: this rank's, along dp_mesh_dims."
        )
    for extension in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        if hasattr(parameter, extension):
            raise NotImplementedError(
                f"fully_shard: parameter {where} has {extension}(), by which it would be gathered "
                "in a form of its own.\nShard plain tensors, or name it in ignored_params."
            )
    # Without the attribute, or of None, gradients are as they come.
    if getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype):
        raise NotImplementedError(
            f"fully_shard: parameter {where} of {parameter.dtype} has grad_dtype "
            f"{parameter.grad_dtype}.\nLeave it out, and sum in that by MixedPrecisionPolicy("
            "reduce_dtype=...)."
        )


def require_read_only(module: nn.Module, prefix: str, ignored: set[nn.Parameter]) -> None:
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
        return
    if module.weight not in ignored:
        raise NotImplementedError(
            f"fully_shard: {type(module).__name__} '{prefix.rstrip('.')}' has max_norm, by which "
            "its forward writes into its weight: what it writes would be lost.\nLeave max_norm "
            "out, or name its weight in ignored_params."
        )


def require_count(value: object, what: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"fully_shard: {what}: expected a whole number of at least {least}, found {value!r}.\n"
            "Give one."
        )
    return value
