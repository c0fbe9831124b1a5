"""One line that shows how far a long run is; nothing where there is no terminal."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

_WIDTH = 30
_SECONDS_BETWEEN_DRAWS = 0.1


class ProgressBar:
    """Draws over its own line, at most ten times a second."""

    def __init__(self, out: TextIO, total: int) -> None:
        self._out = out if out.isatty() else None
        self._total = max(total, 1)
        self._done = 0
        self._next_draw = 0.0

    def advance(self, text: str) -> None:
        """One more of `total` is done; `text` stands beside the bar."""
        self._done = min(self._done + 1, self._total)
        now = time.monotonic()
        if self._out is None or now < self._next_draw:
            return
        self._next_draw = now + _SECONDS_BETWEEN_DRAWS
        filled = "#" * (_WIDTH * self._done // self._total)
        line = f"[{filled:<{_WIDTH}}] {100 * self._done // self._total:3d} %  {text}"
        self._out.write("\r\033[K" + line[: shutil.get_terminal_size().columns - 1])
        self._out.flush()

    def clear(self) -> None:
        """Takes the bar away, as if there had been none."""
        if self._out is not None:
            self._out.write("\r\033[K")
            self._out.flush()
