"""Transforms of torch.func around a sharded module's forward."""

from __future__ import annotations

import torch

_functorch = torch._C._functorch

# Names of the functions, by kind of transform.
_REFUSED = {
    _functorch.TransformType.Grad: "torch.func.grad, vjp or jacrev",
    _functorch.TransformType.Jvp: "torch.func.jvp or jacfwd",
}


def require_none_that_differentiates() -> None:
    """Refuses transforms whose backward does not reach the units, vmap with a graph among them.

    Raises:
        NotImplementedError: that names the transform.
    """
    if _functorch.peek_interpreter_stack() is None:
        return
    kinds = [interpreter.key() for interpreter in _functorch.get_interpreter_stack()]
    found, instead = [_REFUSED[kind] for kind in kinds if kind in _REFUSED], "torch.autograd"
    if not found and _functorch.TransformType.Vmap in kinds and torch.is_grad_enabled():
        found, instead = ["torch.func.vmap with gradients"], "no_grad()"
    if found:
        raise NotImplementedError(
            f"fully_shard: found {found[-1]} around the forward of a sharded module.\nUse "
            f"{instead}, or call it inside of whole_parameters()."
        )
