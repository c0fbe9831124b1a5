"""Makes one C++ program of the C++ blocks on docs/'s pages.

    make_cpp.py <file to write>

A page's blocks are one function, below what a page takes as given (given.h).
"""

import pathlib
import sys

from page_blocks import DOCS, blocks_of, pages_with


def function_of(page: str) -> str:
    blocks = [block for block in blocks_of(DOCS / f"{page}.md") if block.language == "cpp"]
    code = "".join(f'#line {block.line} "{block.page}"\n{block.code}' for block in blocks)
    return f"void {page}(Given& given) {{\nBRIGADE_DOCS_NAMES(given);\n{code}}}\n"


def main() -> None:
    pages = pages_with("cpp")
    text = '#include "brigade/tests/docs/given.h"\n\nnamespace {\n\n'
    text += "\n".join(function_of(page) for page in pages)
    text += "\n}  // namespace\n\nint main() {\n"
    text += "  const brigade::GroupScope scope(brigade::init_process_group());\n"
    text += "".join(f'  run_page("{page}", {page}, scope.group());\n' for page in pages)
    text += "  return 0;\n}\n"
    pathlib.Path(sys.argv[1]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
