"""Training with a framework, by torch's wrapper and by brigade's, in each order of compiling.

    torchrun --standalone --nproc-per-node 2 framework_program.py lightning|accelerate|trainer

The framework constructs the wrapper; ``install()`` and ``uninstall()`` choose its class. Prints a
line per order of compiling. Fails if the class is not the chosen one or if weights differ.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import brigade

_STEPS = 4
_BATCH = 2
_LENGTH = 16
_BACKEND = "aot_eager"
_ORDERS = ("plain", "compiled inside", "compiled around")


class _Rows(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        count = _STEPS * _BATCH * int(os.environ["WORLD_SIZE"])
        self.rows = torch.randint(0, 32, (count, _LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def _language_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=_LENGTH, n_embd=16, n_layer=2, n_head=2)
    )


def _wrapper_in(model: nn.Module) -> str:
    """Returns the top-level package of the wrapper's class."""
    original = getattr(model, "_orig_mod", model)
    return type(original).__module__.partition(".")[0]


def _lightning(order: str) -> tuple[str, nn.Module]:
    import lightning

    wrappers = []

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = nn.Sequential(nn.Linear(_LENGTH, 24), nn.ReLU(), nn.Linear(24, 32))
            self.layers = torch.compile(layers, backend=_BACKEND) if inside else layers

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            rows = batch["input_ids"]
            return nn.functional.cross_entropy(self.layers(rows.float() / 32), rows[:, 0])

        def on_train_start(self) -> None:
            wrappers.append(_wrapper_in(self.trainer.strategy.model))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    inside = order == "compiled inside"
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        torch.compile(model, backend=_BACKEND) if order == "compiled around" else model,
        DataLoader(_Rows(), batch_size=_BATCH),
    )
    return wrappers[0], model


def _accelerate(order: str) -> tuple[str, nn.Module]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import TorchDynamoPlugin

    AcceleratorState._reset_state()
    GradientState._reset_state()
    around = TorchDynamoPlugin(backend=_BACKEND) if order == "compiled around" else None
    accelerator = Accelerator(cpu=True, dynamo_plugin=around)
    plain = _language_model()
    model, optimizer, loader = accelerator.prepare(
        torch.compile(plain, backend=_BACKEND) if order == "compiled inside" else plain,
        torch.optim.AdamW(plain.parameters(), lr=1e-2),
        DataLoader(_Rows(), batch_size=_BATCH),
    )
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch).loss)
        optimizer.step()
    return _wrapper_in(model), plain


def _trainer(order: str) -> tuple[str, nn.Module]:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    AcceleratorState._reset_state()
    GradientState._reset_state()
    wrappers = []

    class RecordWrapper(TrainerCallback):
        def on_step_end(self, arguments, state, control, **others) -> None:
            wrappers.append(_wrapper_in(trainer.model_wrapped))

    plain = _language_model()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            torch.compile(plain, backend=_BACKEND) if order == "compiled inside" else plain,
            TrainingArguments(
                folder,
                use_cpu=True,
                learning_rate=1e-2,
                per_device_train_batch_size=_BATCH,
                max_steps=_STEPS,
                report_to="none",
                save_strategy="no",
                remove_unused_columns=False,
                disable_tqdm=True,
                torch_compile=order == "compiled around",
                torch_compile_backend=_BACKEND if order == "compiled around" else None,
            ),
            train_dataset=_Rows(),
            callbacks=[RecordWrapper()],
        )
        trainer.train()
    return wrappers[0], plain


_FRAMEWORKS: dict[str, Callable[[str], tuple[str, nn.Module]]] = {
    "lightning": _lightning,
    "accelerate": _accelerate,
    "trainer": _trainer,
}


def _train(framework: str, order: str, expected: str) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    wrapper, model = _FRAMEWORKS[framework](order)
    assert wrapper == expected, f"{framework} wrapped by {wrapper}'s class, not by {expected}'s"
    return [parameter.detach().clone() for parameter in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=_FRAMEWORKS)
    framework = parser.parse_args().framework
    torch.set_num_threads(1)
    for order in _ORDERS:
        stock = _train(framework, order, "torch")
        brigade.install()
        ours = _train(framework, order, "brigade")
        brigade.uninstall()
        assert all(map(torch.equal, ours, stock)), f"{framework}, {order}"
        print(f"rank {dist.get_rank()}: {framework}, {order}: torch's bits", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
