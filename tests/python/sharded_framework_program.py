"""Sharded training with a framework, by torch's fully_shard and by brigade's.

    torchrun --standalone --nproc-per-node 2 sharded_framework_program.py lightning|accelerate

``install()`` selects the implementation. Fails if the other one is used, or if losses, weights of
Lightning's checkpoint or losses after its resume differ. ``accelerate-cuda`` trains on a device.
Its losses may differ by 1e-6, because sums on devices have no fixed order.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import brigade

from framework_program import _BATCH, _language_model, _Rows

_WORLD_SIZE = int(os.environ["WORLD_SIZE"])


def _lightning() -> tuple[nn.Module, list[float]]:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    losses = []

    class Language(lightning.LightningModule):
        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            torch.manual_seed(0)
            self.model = _language_model()
            mesh = self.device_mesh["data_parallel"]
            for block in self.model.transformer.h:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def fit(max_epochs: int, path: str | None = None) -> tuple[lightning.Trainer, Language]:
        module = Language()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=_WORLD_SIZE,
            strategy=ModelParallelStrategy(_WORLD_SIZE, 1, save_distributed_checkpoint=False),
            max_epochs=max_epochs,
            gradient_clip_val=10.0,  # above all norms, whose last bits differ
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(_Rows(), batch_size=_BATCH), ckpt_path=path)
        return trainer, module

    trainer, _ = fit(max_epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        path = trainer.strategy.broadcast(f"{folder}/one")
        trainer.save_checkpoint(path)
        if dist.get_rank() == 0:
            saved = torch.load(path, weights_only=False)
            state = saved["state_dict"].values()
            losses += [value.double().sum().item() for value in state]
            losses += [value.numel() for value in state]
        _, module = fit(max_epochs=2, path=path)
    return module.model, losses


def _accelerate(on_cpus: bool = True) -> tuple[nn.Module, list[float]]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=not on_cpus)
    GradientState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        cpu_ram_efficient_loading=False,
    )
    if on_cpus:  # accelerate supports FSDP on accelerators only
        accelerator = Accelerator(cpu=True)
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    else:
        accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    plain = _language_model()
    model, optimizer, loader = accelerator.prepare(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=1e-2),
        DataLoader(_Rows(), batch_size=_BATCH),
    )
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


_FRAMEWORKS: dict[str, Callable[[], tuple[nn.Module, list[float]]]] = {
    "lightning": _lightning,
    "accelerate": _accelerate,
    "accelerate-cuda": functools.partial(_accelerate, on_cpus=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=_FRAMEWORKS)
    framework = parser.parse_args().framework
    torch.set_num_threads(1)
    model, stock = _FRAMEWORKS[framework]()
    assert not isinstance(model, brigade.FSDPModule)
    with brigade.install():
        model, ours = _FRAMEWORKS[framework]()
    assert isinstance(model, brigade.FSDPModule)
    if framework == "accelerate-cuda":
        assert next(model.parameters()).is_cuda
        assert all(map(functools.partial(math.isclose, rel_tol=1e-6), ours, stock)), (ours, stock)
    else:
        assert ours == stock, (ours, stock)
    print(f"rank {dist.get_rank()}: {framework}: {len(ours)} numbers as torch's", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
