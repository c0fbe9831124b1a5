"""Sharded training of a small GPT on Python's documentation.

    torchrun --standalone --nproc-per-node 2 examples/python/train_gpt.py --folder /tmp/gpt

A second run resumes from the last checkpoint, on any number of ranks. On two ranks all
strategies end with the same weights. Nothing is downloaded: the text is that of ``help()``.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import brigade

LENGTH = 128


class GPT(nn.Module):
    """Predicts the next byte. Its first and last layer share a weight."""

    def __init__(self, size: int, heads: int, num_blocks: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, size))
        self.blocks = nn.ModuleList([self.make_block(size, heads) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)
        self.head.weight = self.bytes.weight

    @staticmethod
    def make_block(size: int, heads: int) -> nn.Module:
        return nn.TransformerEncoderLayer(
            size, heads, 4 * size, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """`text`: [batch, length]; returns [batch, length, 256]."""
        x = self.bytes(text) + self.positions[: text.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(text.size(1))
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))


# Arguments of brigade.fully_shard, by strategy.
STRATEGIES: dict[str, Callable[[int], dict]] = {
    # Shards parameters, gradients and optimizer state.
    "full": lambda _: {"reshard_after_forward": True},
    # Keeps parameters unsharded from forward to backward.
    "grad": lambda _: {"reshard_after_forward": False},
    # Shards nothing.
    "none": lambda num_ranks: {"mesh": init_device_mesh("cpu", (num_ranks, 1))},
}


def sharded(model: GPT, strategy: str) -> GPT:
    """Makes each block an FSDP unit, and the layers around the blocks another."""
    options = STRATEGIES[strategy](dist.get_world_size())
    for block in model.blocks:
        brigade.fully_shard(block, **options)
    brigade.fully_shard([model.bytes, model.norm, model.head], **options)
    return brigade.fully_shard(model, **options)


def documentation() -> torch.Tensor:
    """Returns the bytes of all topics of help(), as int64."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch_of(text: torch.Tensor, step: int, batch_size: int) -> torch.Tensor:
    """Returns this rank's excerpts of a step, [batch_size, LENGTH + 1]."""
    seed = step * dist.get_world_size() + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH - 1, (batch_size, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


def last_checkpoint(folder: pathlib.Path | None) -> pathlib.Path | None:
    """Returns the checkpoint of the highest step, or None."""
    found = [] if folder is None else folder.glob("step-*[0-9]")
    return max(found, key=lambda path: int(path.name.split("-")[1]), default=None)


def random_state_path(path: pathlib.Path) -> pathlib.Path:
    """Returns this rank's file: dropout differs between ranks."""
    return path.with_name(f"random-{path.name}-of-{dist.get_rank()}.pt")


def digest(model: GPT) -> str:
    """Returns a short hash of the parameters' bits."""
    bits = hashlib.sha256()
    for tensor in model.full_state_dict().values():
        bits.update(tensor.numpy().tobytes())
    return bits.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=STRATEGIES, default="full")
    parser.add_argument("--steps", type=int, default=200, help="number of the last step")
    parser.add_argument("--batch-size", type=int, default=8, help="excerpts per step and rank")
    parser.add_argument("--size", type=int, default=128, help="width of the network")
    parser.add_argument("--blocks", type=int, default=4, help="transformer blocks")
    parser.add_argument("--folder", type=pathlib.Path, help="checkpoints; default: none saved")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = sharded(GPT(arguments.size, 4, arguments.blocks), arguments.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    torch.manual_seed(rank)  # for dropout

    first = 0
    if (path := last_checkpoint(arguments.folder)) is not None:
        first = int(brigade.load_shards(model, path, optimizer)["step"])
        if (random := random_state_path(path)).exists():
            torch.set_rng_state(torch.load(random))
        if rank == 0:
            print(f"resuming after step {first}", flush=True)

    text = documentation()
    with tqdm(range(first, arguments.steps), disable=rank != 0) as bar:
        for step in bar:
            rows = batch_of(text, step, arguments.batch_size)
            optimizer.zero_grad()
            logits = model(rows[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
            done = step + 1
            if arguments.folder and (done % arguments.save_every == 0 or done == arguments.steps):
                arguments.folder.mkdir(parents=True, exist_ok=True)
                path = arguments.folder / f"step-{done}"
                torch.save(torch.get_rng_state(), random_state_path(path))
                brigade.save_shards(model, path, optimizer, metadata={"step": str(done)})
    weights = digest(model)
    if rank == 0:
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        print(f"{arguments.strategy}: {held:,} parameters on rank 0, weights {weights}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
