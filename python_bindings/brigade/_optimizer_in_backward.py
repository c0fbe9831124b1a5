"""Optimizers that step in backward, behind any comm hook.

torch.distributed.optim gives parameters optimizers of their own
(`_apply_optimizer_in_backward`). Differs from torch's DistributedDataParallel,
which steps them behind its own all-reduce alone, and only where there is an
accelerator.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

_Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Any]]


def has_optimizer(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "_in_backward_optimizers")


def take_over(parameter: torch.Tensor) -> None:
    """The parameter's optimizers no longer step by themselves."""
    from torch.distributed.optim import apply_optimizer_in_backward

    for handle in apply_optimizer_in_backward.param_to_optim_hook_handle_map.get(parameter, []):
        handle.remove()


def stepping_hook(hook: _Hook, parameters: list[torch.Tensor]) -> _Hook:
    """`hook`, then the steps of the bucket's parameters with what it returned.

    On an accelerator they run on a stream of their own, while backward goes on.
    `parameters` are those that are stepped, on one device; held weakly. They have
    no gradients once backward is over.
    """
    device = parameters[0].device
    stream = None if device.type == "cpu" else torch.Stream(device)
    stepped = [weakref.ref(parameter) for parameter in parameters]
    will_forget = False

    def forget_gradients() -> None:
        nonlocal will_forget
        will_forget = False
        if stream is not None:
            torch.accelerator.current_stream(device).wait_stream(stream)
        for reference in stepped:
            parameter = reference()
            if parameter is not None:
                parameter.grad = None

    @functools.wraps(hook)
    def hook_then_steps(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal will_forget
        arrived = hook(state, bucket)
        with nullcontext() if stream is None else stream:
            result = arrived.wait()
            if isinstance(result, (list, tuple)):
                result = result[0]
            bucket.set_buffer(result)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if has_optimizer(parameter):
                    parameter.grad = gradient
                    for optimizer in parameter._in_backward_optimizers:
                        optimizer.step()
        if not will_forget:
            will_forget = True
            torch.autograd.Variable._execution_engine.queue_callback(forget_gradients)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(result)
        return done

    return hook_then_steps
