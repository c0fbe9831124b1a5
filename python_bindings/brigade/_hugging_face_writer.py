"""What torch's HuggingFaceStorageWriter can't hold of parts is refused: it would be lost.

A file of safetensors has one entry for a name. The writer gives each box of a part the name of
its tensor, so that the last box of those in a file is what remains; and without
save_distributed all ranks write files of the same names.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict

from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.planner import SavePlan

_Writer = hf_storage.HuggingFaceStorageWriter
_local_of_torch = _Writer.prepare_local_plan
_global_of_torch = _Writer.prepare_global_plan


@functools.cache
def teach_hugging_face_writer() -> None:
    """From here on it raises on all ranks before anything is written that would be lost."""
    _Writer.prepare_local_plan = _prepare_local_plan
    _Writer.prepare_global_plan = _prepare_global_plan


@functools.wraps(_local_of_torch)
def _prepare_local_plan(self: _Writer, plan: SavePlan) -> SavePlan:
    for name, count in Counter(item.index.fqn for item in plan.items).items():
        if count > 1:
            raise NotImplementedError(
                f"HuggingFaceStorageWriter: expected one box of each tensor from a rank, found "
                f"{count} of '{name}', of which all but one would be lost.\nSave by "
                "brigade.save_whole(), or shard with block_numel_fn, so that no row is cut."
            )
    return _local_of_torch(self, plan)


@functools.wraps(_global_of_torch)
def _prepare_global_plan(self: _Writer, plans: list[SavePlan]) -> list[SavePlan]:
    writers = defaultdict(list)
    for rank, plan in enumerate(plans):
        for file in self._split_by_storage_plan(self.fqn_to_index_mapping, plan.items):
            if plan.items:
                writers[file].append(rank)
    for file, ranks in writers.items():
        if len(ranks) > 1 and not self.save_distributed:
            raise NotImplementedError(
                f"HuggingFaceStorageWriter: expected one rank to write file {file}, found {ranks}, "
                "of which what the last has written would remain.\nGive it save_distributed=True, "
                "or save by brigade.save_whole()."
            )
    return _global_of_torch(self, plans)
