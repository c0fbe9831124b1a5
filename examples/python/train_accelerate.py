"""Trains a small GPT-2 on Python's own documentation with accelerate.

    torchrun --standalone --nproc-per-node 2 examples/python/train_accelerate.py

``brigade.install()`` is the one line that differs: accelerate builds
DistributedDataParallel itself. Nothing is downloaded: the model is made from its
config, the text is what ``help()`` shows.
"""

from __future__ import annotations

import argparse
import math
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import brigade

LENGTH = 64


def excerpts() -> TensorDataset:
    """The text as rows of LENGTH bytes."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return TensorDataset(rows[: len(rows) // LENGTH * LENGTH].view(-1, LENGTH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    brigade.install()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=96,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        DataLoader(excerpts(), batch_size=16, shuffle=True, drop_last=True),
    )
    kind = type(model)
    print(f"rank {accelerator.process_index}: {kind.__module__}.{kind.__qualname__}", flush=True)

    losses = []
    steps = min(arguments.steps, len(loader))
    with tqdm(total=steps, disable=not accelerator.is_main_process) as bar:
        for (rows,) in loader:
            optimizer.zero_grad()
            loss = model(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
            bar.update()
            if len(losses) == steps:
                break
    last = losses[-20:]
    bits = sum(last) / len(last) / math.log(2)
    accelerator.print(
        f"{bits:.2f} bits per byte at the end, {losses[0] / math.log(2):.2f} at first"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
