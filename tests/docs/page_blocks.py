"""Code blocks of a page of docs/.

A block's fence names its language and, optionally, its use ("```python torchrun"). The blocks of
one language without a use form one program, in the order of the page.
"""

from __future__ import annotations

import pathlib
import re
from dataclasses import dataclass

DOCS = pathlib.Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
_FENCE = re.compile(r"^```(?P<words>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: pathlib.Path
    line: int  # of the first line of code
    language: str
    use: str  # the word after the language, or ""
    code: str


def blocks_of(page: pathlib.Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, _, use = match["words"].partition(" ")
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(page, line, language, use.strip(), match["code"]))
    return found


def pages_with(language: str) -> list[str]:
    """Returns the names of the pages that have blocks in a language, without suffix."""
    return [
        page.stem
        for page in sorted(DOCS.glob("*.md"))
        if any(block.language == language for block in blocks_of(page))
    ]


def cpp_pages() -> list[pathlib.Path]:
    """Returns the pages that make_cpp.py compiles."""
    return [*(DOCS / f"{page}.md" for page in pages_with("cpp")), README]
