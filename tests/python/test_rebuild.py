"""Buckets are rebuilt in the forward in which torch rebuilds them."""

import pytest
from torch import nn

from ranks import on_ranks
from training import CLASSES, Perceptron, inputs, loss_of


class _Shared(nn.Module):
    """A weight used twice."""

    def __init__(self):
        super().__init__()
        self.body = Perceptron()
        self.twice = nn.Linear(3, 3)

    def forward(self, x):
        return self.twice(self.twice(self.body(x)).tanh())


@pytest.mark.parametrize(
    ("make_model", "options"),
    [
        (Perceptron, {}),
        (Perceptron, {"gradient_as_bucket_view": True}),
        (Perceptron, {"find_unused_parameters": True}),
        (Perceptron, {"static_graph": True}),
        (_Shared, {"static_graph": True}),
        (_Shared, {"static_graph": True, "find_unused_parameters": True}),
    ],
    ids=["default", "views", "find_unused", "static", "static_shared", "static_find_unused"],
)
@on_ranks()
def test_buckets_are_rebuilt_when_torch_rebuilds_them(rank, make_model, options):
    """Per forward: whether buckets have been rebuilt; then what they are."""
    seen = {}
    for name, wrapper in CLASSES.items():
        wrapped = wrapper(make_model(), bucket_cap_mb_list=[1e-5], **options)
        forwards = []
        for step, x in enumerate(inputs(rank, 6)):
            if step == 1:
                with wrapped.no_sync():  # counts for nothing
                    loss_of(wrapped(x)).backward()
                forwards.append(wrapped._has_rebuilt_buckets)
            loss = loss_of(wrapped(x))
            forwards.append(wrapped._has_rebuilt_buckets)
            loss.backward()
        data = wrapped._get_ddp_logging_data()
        keys = ("rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices")
        seen[name] = (forwards, [data.get(key) for key in keys])
    assert seen["brigade"] == seen["torch"]
