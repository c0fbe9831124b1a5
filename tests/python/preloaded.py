"""What each rank's process starts with: imported once, and shared by all that are forked.

A collection of garbage writes to every object that it looks at, and a page that is written
to is copied: each would cost a rank a quarter of a second. Frozen objects are not looked at.
"""

import gc
import importlib

for name in ("pytest", "torch._dynamo", "torch.distributed.fsdp", "brigade", "rank_state"):
    importlib.import_module(name)
gc.collect()
gc.freeze()
