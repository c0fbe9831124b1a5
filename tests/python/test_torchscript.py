"""Models with TorchScript modules: scripted, traced, and loaded from a file."""

import io
import warnings

import pytest
import torch
from torch import nn

from ranks import on_ranks
from training import expect_torchs_bits, inputs, train

warnings.filterwarnings("ignore", message=r"`torch.jit.*is deprecated", category=FutureWarning)


def _scripted(module):
    return torch.jit.script(module)


def _traced(module):
    return torch.jit.trace(module, torch.ones(1, 6))


def _loaded(module):
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return torch.jit.load(file)


KINDS = {"scripted": _scripted, "traced": _traced, "loaded": _loaded}


def _backbone():
    # Only operators whose rounding does not change once TorchScript has optimized them.
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 3)))


def _model(kind):
    torch.manual_seed(0)
    return nn.Sequential(KINDS[kind](_backbone()), nn.Linear(3, 2))


OPTIONS = ({}, {"find_unused_parameters": True}, {"static_graph": True})


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_scripted_parts_and_models_have_torchs_bits(rank, kind, whole):
    for options in OPTIONS:

        def run(wrapper, options=options):
            model = KINDS[kind](_model("scripted")) if whole else _model(kind)
            return train(wrapper(model, **options), inputs(rank, 4))

        expect_torchs_bits(run)
