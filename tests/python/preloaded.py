"""Modules that the ranks' processes share: imported once, before processes are forked.

A garbage collection writes to every object, and so copies the shared pages, which costs a rank a
quarter of a second. Frozen objects are not written.
"""

import gc
import importlib

for name in ("pytest", "torch._dynamo", "torch.distributed.fsdp", "brigade", "rank_state"):
    importlib.import_module(name)
gc.collect()
gc.freeze()
