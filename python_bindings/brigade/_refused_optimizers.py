"""Optimizers that compute more of a parameter than norms, and would do so of parts of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from brigade._muon_of_parts import teach_muon
from brigade._sharded_tensors import ShardedParameter

# Each with what it computes that a part has another one of.
_REFUSED = {
    "LBFGS": "dot products of all parameters",
    "Adafactor": "means of rows and columns",
}
# Of other packages, by the names of their classes.
_REFUSED_ELSEWHERE = {
    **_REFUSED,
    "AdaMuon": "products of matrices",
    "AdamP": "projections of whole gradients",
    "Muon": "products of matrices",
    "SGDP": "projections of whole gradients",
    "SOAP": "products of matrices",
    "Shampoo": "products of matrices",
}


@functools.cache
def refuse_optimizers() -> None:
    """From here on their steps raise where a parameter of theirs is in parts."""
    refused = _REFUSED if teach_muon() else {**_REFUSED, "Muon": "products of matrices"}

    def check(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        found = next(
            (name for name in refused if isinstance(optimizer, getattr(torch.optim, name, ()))),
            None,
        )
        computes = refused.get(found)
        if found is None and not isinstance(optimizer, getattr(torch.optim, "Muon", ())):
            classes = (cls.__name__ for cls in type(optimizer).__mro__)
            found = next((name for name in classes if name in _REFUSED_ELSEWHERE), None)
            computes = _REFUSED_ELSEWHERE.get(found)
        if computes is None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, ShardedParameter) and _is_cut(parameter):
                    raise NotImplementedError(
                        f"{found} of sharded parameters: it takes {computes}, which "
                        "would be of this rank's parts, and other ranks' steps different.\n"
                        "Use one that goes element by element, as AdamW."
                    )

    register_optimizer_step_pre_hook(check)


def _is_cut(parameter: ShardedParameter) -> bool:
    """On some rank; all answer alike."""
    return parameter._brigade_place.require_unit().num_shards > 1
