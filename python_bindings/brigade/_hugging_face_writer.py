"""What torch's HuggingFaceStorageWriter can't hold of parts is refused: it would be lost.

A file of safetensors has one entry for a name. The writer gives each box of a part the name of
its tensor, so that the last box of those in a file is what remains.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.planner import SavePlan

_of_torch = hf_storage.HuggingFaceStorageWriter.prepare_global_plan


@functools.cache
def teach_hugging_face_writer() -> None:
    """From here on it raises on all ranks before anything is written that would be lost."""
    hf_storage.HuggingFaceStorageWriter.prepare_global_plan = _prepare_global_plan


@functools.wraps(_of_torch)
def _prepare_global_plan(
    self: hf_storage.HuggingFaceStorageWriter, plans: list[SavePlan]
) -> list[SavePlan]:
    _require_one_entry_for_each_name(plans, self.save_distributed)
    return _of_torch(self, plans)


def _require_one_entry_for_each_name(plans: Sequence[SavePlan], has_files_by_rank: bool) -> None:
    for rank, plan in enumerate(plans):
        boxes = Counter(item.index.fqn for item in plan.items)
        for name, count in boxes.items():
            if count > 1:
                raise NotImplementedError(
                    f"HuggingFaceStorageWriter: expected one box of each tensor from a rank, found "
                    f"{count} of '{name}' from rank {rank}, of which all but one would be lost.\n"
                    "Save by brigade.save_whole(), or shard with block_numel_fn, so that no row "
                    "is cut."
                )
    writers = [rank for rank, plan in enumerate(plans) if plan.items]
    if not has_files_by_rank and len(writers) > 1:
        raise NotImplementedError(
            f"HuggingFaceStorageWriter: ranks {writers} would write parts into one file, and those "
            "of the last remain.\nGive it save_distributed=True, or save by brigade.save_whole()."
        )
