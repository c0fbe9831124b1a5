"""Ties a forward's outputs together, so that the loss may leave some of them out."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import distributed as torch_ddp

from brigade._C import tie_outputs

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def tie(output: Any, copies: bool) -> Any:
    """A stand-in for any nest of tensors: a backward from one of them goes through all.

    `copies`: the tensors are copies, which the caller may change in place, as torch's; what
    their backward needs is left alone.
    """
    leaves, structure, is_rref = torch_ddp._tree_flatten_with_rref(output)
    tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
    count = sum(tensor.grad_fn is not None for tensor in tensors)
    if count == 0 or (count == 1 and not copies):
        return output
    tied = iter(_tied(tensors, count, copies))
    leaves = [next(tied) if torch.is_tensor(leaf) else leaf for leaf in leaves]
    return torch_ddp._tree_unflatten_with_rref(leaves, structure, is_rref)


def _tied(tensors: list[torch.Tensor], count: int, copies: bool) -> list[torch.Tensor]:
    if count == 1:
        return [tensor if tensor.grad_fn is None else tensor.clone() for tensor in tensors]
    if all(type(tensor) in _PLAIN_TYPES for tensor in tensors):
        return tie_outputs(tensors, copies=copies)
    with_history = [tensor for tensor in tensors if tensor.grad_fn is not None]
    tied = iter(_PythonTie.apply(copies, *with_history))
    return [tensor if tensor.grad_fn is None else next(tied) for tensor in tensors]


class _PythonTie(torch.autograd.Function):
    """As tie_outputs(), but tensors keep the subclass of torch.Tensor that they are of."""

    @staticmethod
    def forward(ctx: Any, copies: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors) if copies else tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *gradients)
