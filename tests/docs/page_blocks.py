"""Takes the code blocks out of a page of docs/.

A block's fence names its language, and behind it what is to be done with it
("```python torchrun"). The blocks of one language that have no such word are one
program, from the top of the page to its end.
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
    """Code as it stands on the page."""

    page: pathlib.Path
    line: int  # of its first line
    language: str
    use: str  # the word behind the language, or ""
    code: str


def blocks_of(page: pathlib.Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        language, _, use = match["words"].partition(" ")
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(page, line, language, use.strip(), match["code"]))
    return found


def name_of(page: pathlib.Path) -> str:
    """Path below docs/ without its ending, such as "guides/sharding"."""
    return page.relative_to(DOCS).with_suffix("").as_posix()


def pages_with(language: str) -> list[str]:
    """Names of the pages that have blocks in a language."""
    return [
        name_of(page)
        for page in sorted(DOCS.rglob("*.md"))
        if any(block.language == language for block in blocks_of(page))
    ]


def cpp_pages() -> list[pathlib.Path]:
    """The pages whose C++ blocks make_cpp.py takes."""
    return [*(DOCS / f"{page}.md" for page in pages_with("cpp")), README]
