"""Trains a small network with Lightning, which constructs DistributedDataParallel itself.

    torchrun --standalone --nproc-per-node 2 examples/python/train_lightning.py

``brigade.install()`` is the only change. Nothing is downloaded: the digits come with scikit-learn.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import brigade


class Classifier(lightning.LightningModule):
    """Two layers for 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        right = self.layers(images).argmax(1) == labels
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class PrintWrapper(lightning.Callback):
    """Prints the class in which Lightning wraps the model."""

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        kind = type(trainer.strategy.model)
        print(f"rank {trainer.global_rank}: {kind.__module__}.{kind.__qualname__}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    brigade.install()

    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    dataset = TensorDataset(images, torch.tensor(data.target))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=arguments.epochs,
        callbacks=[PrintWrapper()],
        logger=False,
        enable_checkpointing=False,
    )
    model = Classifier()
    # The last 360 of 1797 images are test data.
    training, test = (torch.utils.data.Subset(dataset, r) for r in (range(1437), range(1437, 1797)))
    trainer.fit(model, DataLoader(training, batch_size=32, shuffle=True))
    trainer.test(model, DataLoader(test, batch_size=60))


if __name__ == "__main__":
    main()
