"""Options of the wrapper, compared with torch's class."""

import inspect
import warnings

import pytest
import torch
from torch import nn

import brigade

from ranks import on_ranks
from training import CLASSES


@pytest.mark.parametrize(
    ("check", "expected"), [("error", RuntimeError), ("warn", UserWarning), ("off", None)]
)
@on_ranks()
def test_a_changed_module_is_an_error_a_warning_or_ignored(rank, check, expected):
    wrapped = brigade.DistributedDataParallel(nn.Sequential(nn.Linear(3, 2)), check_module=check)
    wrapped.module.append(nn.Linear(2, 2))
    x = torch.full((1, 3), float(rank))
    for _ in range(2):
        wrapped.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if expected is RuntimeError:
                with pytest.raises(RuntimeError, match=r"added: '1\.weight'"):
                    wrapped(x)
                return
            wrapped(x).sum().backward()
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (expected is UserWarning)
        assert all("added: '1.weight', '1.bias'" in text for text in texts)
        average = wrapped.module[0].weight.grad / wrapped.module[1].weight.sum(0)[:, None]
        assert torch.allclose(average, torch.full((2, 3), 0.5))  # other parameters are reduced


class _OwnBuffer(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.tensor([float(rank + 1)]))

    def forward(self, x):
        return self.layer(x)


# Compares with torch's class if its version has the argument.
_CLASSES = [brigade.DistributedDataParallel]
if "forward_sync_buffers" in inspect.signature(CLASSES["torch"]).parameters:
    _CLASSES.append(CLASSES["torch"])


@pytest.mark.parametrize(
    ("options", "at_construction", "in_forward"),
    [
        ({}, True, True),
        ({"broadcast_buffers": True}, True, True),
        ({"broadcast_buffers": False}, False, False),
        ({"forward_sync_buffers": True}, True, True),
        ({"forward_sync_buffers": False}, True, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
        ({"broadcast_buffers": True, "forward_sync_buffers": False}, True, False),
    ],
    ids=str,
)
@on_ranks()
def test_buffers_are_synced_when_torch_syncs_them(rank, options, at_construction, in_forward):
    for wrapper in _CLASSES:
        wrapped = wrapper(_OwnBuffer(rank), **options)
        assert wrapped.module.seen.item() == (1 if at_construction else rank + 1)
        assert wrapped.forward_sync_buffers is wrapped.broadcast_buffers is in_forward
        wrapped.module.seen.fill_(10.0 + rank)
        wrapped(torch.ones(1, 2)).sum().backward()
        assert wrapped.module.seen.item() == (10 if in_forward else 10 + rank)
        wrapped.broadcast_buffers = not in_forward
        assert wrapped.forward_sync_buffers is not in_forward
        wrapped.module.seen.fill_(20.0 + rank)
        wrapped(torch.ones(1, 2)).sum().backward()
        assert wrapped.module.seen.item() == (20 + rank if in_forward else 20)
