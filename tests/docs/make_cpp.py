"""Writes a C++ program of the C++ blocks in docs/ and the README.

    make_cpp.py <output file>

The blocks of a page form one function, which starts with the names of given.h. The README's first
block is left out, because it is a whole program (tests/readme). Its other blocks have a scope each.
"""

import pathlib
import sys

from page_blocks import DOCS, README, Block, blocks_of, cpp_pages


def code_of(block: Block) -> str:
    return f'#line {block.line} "{block.page}"\n{block.code}'


def function_of(page: pathlib.Path) -> str:
    blocks = [block for block in blocks_of(page) if block.language == "cpp"]
    names = "BRIGADE_DOCS_NAMES(given);\n"
    if page == README:
        names += "BRIGADE_README_NAMES;\n"
        code = "".join(f"{{\n{code_of(block)}}}\n" for block in blocks[1:])
    else:
        code = "".join(map(code_of, blocks))
    return f"void {page.stem}(Given& given) {{\n{names}{code}}}\n"


def main() -> None:
    pages = cpp_pages()
    text = '#include "brigade/tests/docs/given.h"\n\nnamespace {\n\n'
    text += "\n".join(map(function_of, pages))
    text += "\n}  // namespace\n\nint main() {\n"
    text += "  const brigade::GroupScope scope(brigade::init_process_group());\n"
    for page in pages:
        name = page.relative_to(DOCS.parent)
        text += f'  run_page("{name}", {page.stem}, scope.group());\n'
    text += "  return 0;\n}\n"
    pathlib.Path(sys.argv[1]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
