"""Units with their own meshes: experts that only some ranks hold. Training in integers."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import brigade

from ranks import on_ranks, run_ranks
from sharded_training import expect_equal_on_ranks
from whole_numbers import linear, step_by_sign

WORLD_SIZE = 4


class Moe(nn.Module):
    def __init__(self, expert: nn.Linear, dense: nn.Linear, head: nn.Linear, name: str) -> None:
        super().__init__()
        self.dense, self.head = dense, head
        self.experts = nn.ModuleDict({name: expert})

    def forward(self, x, uses_expert=True):
        x = self.dense(x)
        if uses_expert:
            for expert in self.experts.values():
                x = expert(x)
        return self.head(x)


def _linear(seed):
    return linear(3, 3, seed)


def make_moe(group, name=None):
    """Returns a rank's model; ranks of a group have different experts."""
    name = str(group) if name is None else name
    return Moe(_linear(group), _linear(10), _linear(11), name)


def batch_of(rank, step):
    return ((torch.arange(6) + rank + 2 * step) % 4 - 1.0).view(2, 3).double()


class OneProcess:
    """Training in one process: averages experts over their ranks, dense layers over all."""

    def __init__(self, num_groups=2):
        dense, head = _linear(10), _linear(11)
        self.models = [Moe(_linear(g), dense, head, str(g)) for g in range(num_groups)]

    def parameters(self):
        return list({p: None for model in self.models for p in model.parameters()})

    def backward(self, step, uses_expert=lambda rank: True):
        num_groups = len(self.models)
        for parameter in self.parameters():
            parameter.grad = None
        for rank in range(WORLD_SIZE):
            self.models[rank % num_groups](batch_of(rank, step), uses_expert(rank)).sum().backward()
        experts = {p for model in self.models for p in model.experts.parameters()}
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad /= WORLD_SIZE // (num_groups if parameter in experts else 1)

    def step(self):
        step_by_sign(nn.ModuleList(self.models))


def meshes():
    """Returns a mesh of all ranks, and one of this rank's expert: {0, 2} or {1, 3}."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    return init_device_mesh("cpu", (WORLD_SIZE,)), both["shard"]


def shard_moe(model, all_ranks, of_expert, shard=brigade.fully_shard):
    for expert in model.experts.values():
        shard(expert, mesh=of_expert)
    shard(model.dense, mesh=all_ranks)
    return shard(model, mesh=all_ranks)


def expect_whole(model, reference, group):
    state = model.full_state_dict()
    for name, value in reference.models[group].state_dict().items():
        assert torch.equal(state[name], value), name


def step_with(reference, model, rank, step, expert, uses_expert=lambda rank: True):
    model.zero_grad()
    model(batch_of(rank, step), uses_expert(rank)).sum().backward()
    reference.backward(step, uses_expert)
    step_by_sign(model)
    reference.step()
    expect_whole(model, reference, expert)


@on_ranks(WORLD_SIZE)
def test_training_equals_one_process(rank):
    group = rank % 2
    all_ranks, of_expert = meshes()
    reference = OneProcess()
    model = shard_moe(make_moe(group), all_ranks, of_expert)
    for step in range(4):
        # Routing: one rank, or all ranks of an expert, have no tokens.
        def uses_expert(r, step=step):
            return (r != 1, r % 2 == 0, True, True)[step]

        step_with(reference, model, rank, step, group, uses_expert)
    held = sum(p.to_local().numel() for p in model.experts.parameters())
    assert held == 6
    place = "0, 2" if group == 0 else "1, 3"
    assert f"over ranks {place}\n" in model.explain()
    statistics = model.sharding_statistics()
    assert statistics["learned_segments"] <= 2


@on_ranks(WORLD_SIZE)
def test_norms_cover_all_experts(rank):
    reference = OneProcess()
    reference.backward(0)
    gradients = [p.grad for p in reference.parameters()]
    found = {}
    for p in (1.0, float("inf")):
        model = shard_moe(make_moe(rank % 2), *meshes())
        model(batch_of(rank, 0)).sum().backward()
        total = torch.nn.utils.get_total_norm(gradients, p)
        assert model.clip_grad_norm_(1e9, p) == total
        with pytest.raises(NotImplementedError, match=r"the model's clip_grad_norm\(\)"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, p)
        found[p] = total.item()
    assert found[1.0] > 0
    expect_equal_on_ranks(found)


def _bad_mesh(rank):
    """Returns a mesh outside the model's: the model has ranks {0, 1} or {2, 3}."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    model = shard_moe(make_moe(rank % 2), both["expert"], both["shard"])
    with pytest.raises(ValueError, match=r"expected ascending ranks .*world size 2") as e:
        model(batch_of(rank, 0))
    return str(e.value)


def test_a_mesh_of_other_ranks_is_an_error_on_all():
    texts = run_ranks(_bad_mesh, world_size=WORLD_SIZE)
    assert "the mesh of unit 'experts." in texts[0]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]


class _TwoExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(_linear(seed) for seed in range(2))

    def forward(self, x):
        for expert in self.experts:
            x = expert(x)
        return x


@pytest.mark.parametrize("has_mesh_of_all", [False, True])
@on_ranks(WORLD_SIZE)
def test_equal_experts_in_another_order_are_an_error_on_all(rank, has_mesh_of_all):
    all_ranks, of_expert = meshes()
    mesh = (
        init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("dp", "one"))["dp"]
        if has_mesh_of_all
        else of_expert
    )
    model = _TwoExperts()
    for expert in reversed(model.experts) if rank == 2 else model.experts:
        brigade.fully_shard(expert, mesh=mesh)
    model.head = _linear(7)
    brigade.fully_shard(model, mesh=all_ranks)
    words = "unit 'experts.0': expected the same parameter names in the same order"
    if has_mesh_of_all:
        words = "in the same order on all ranks; parameters have been mixed up"
    with pytest.raises(ValueError, match=words):
        model(batch_of(rank, 0))


@on_ranks(WORLD_SIZE)
def test_resumes_from_a_checkpoint(rank, tmp_path):
    folder = str(tmp_path / "checkpoint")

    def make(seed):
        torch.manual_seed(seed)
        model = make_moe(rank % 2)
        shard_moe(model, *meshes())
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model(batch_of(rank, step)).sum().backward()
            optimizer.step()

    model, optimizer = make(0)
    train(model, optimizer, range(3))
    brigade.save_shards(model, folder, optimizer)
    train(model, optimizer, range(3, 6))

    again, resumed = make(1)
    brigade.load_shards(again, folder, resumed)
    train(again, resumed, range(3, 6))
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name
    with pytest.raises(
        NotImplementedError, match="rank 0 lacks the parameters of the other meshes"
    ):
        model.full_state_dict(rank0_only=True)


@on_ranks(WORLD_SIZE)
def test_saving_two_experts_of_one_name_is_an_error(rank, tmp_path):
    model = shard_moe(make_moe(rank % 2, name="here"), *meshes())
    model(batch_of(rank, 0)).sum().backward()
    with pytest.raises(ValueError, match=r"experts\.here\.weight") as e:
        brigade.save_shards(model, tmp_path / "checkpoint")
    expect_equal_on_ranks(str(e.value))
    assert not (tmp_path / "checkpoint").exists()
