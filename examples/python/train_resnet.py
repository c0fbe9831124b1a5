"""Trains torchvision's ResNet-18 on scikit-learn's handwritten digits.

    torchrun --standalone --nproc-per-node 2 examples/python/train_resnet.py

A comment marks the only change from torch's class. ``--ddp torch`` trains with torch's class.
``--ddp both`` trains with each and compares the weights. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.models import resnet18
from tqdm import tqdm

import brigade

CLASSES = {
    "brigade": brigade.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}
TEST_IMAGES = 360


def digits(size: int) -> tuple[TensorDataset, TensorDataset]:
    """Returns training and test images of 3 x size x size pixels, scaled up from 8 x 8."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    images = nn.functional.interpolate(images, size=(size, size), mode="bilinear")
    images = images.expand(-1, 3, -1, -1)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(kind: str, data: TensorDataset, arguments: argparse.Namespace) -> nn.Module:
    """Trains a new model and returns it without its wrapper."""
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    model = CLASSES[kind](model)  # was: model = nn.parallel.DistributedDataParallel(model)

    sampler = DistributedSampler(data, seed=0, drop_last=True)
    loader = DataLoader(data, arguments.batch_size, sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    steps = arguments.steps or len(loader)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        some = itertools.islice(loader, steps)
        with tqdm(some, f"{kind} {epoch + 1}", steps, disable=dist.get_rank() != 0) as bar:
            for images, labels in bar:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                bar.set_postfix(loss=f"{loss.item():.4f}")
    return model.module


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Returns the fraction of images that the model recognizes."""
    model.eval()
    images, labels = data.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def digest(model: nn.Module) -> str:
    """Returns a short hash of the bits of a model's parameters and buffers."""
    bits = hashlib.sha256()
    for tensor in model.state_dict().values():
        bits.update(tensor.numpy().tobytes())
    return bits.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ddp", choices=[*CLASSES, "both"], default="brigade")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="steps per epoch; default: all")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--image-size", type=int, default=16, help="width and height in pixels")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data, test_data = digits(arguments.image_size)
    digests = {}
    for kind in CLASSES if arguments.ddp == "both" else [arguments.ddp]:
        model = train(kind, data, arguments)
        digests[kind] = digest(model)
        if dist.get_rank() == 0:
            share = accuracy(model, test_data)
            print(f"{kind}: test accuracy {share:.2%}, weights {digests[kind]}", flush=True)
    if len(digests) == 2 and dist.get_rank() == 0:
        equal = digests["brigade"] == digests["torch"]
        print("weights equal bit for bit" if equal else "weights differ", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
