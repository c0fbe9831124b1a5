"""Hooks of mkdocs: the C++ reference, tables of benchmarks, and fences that name test programs."""

import csv
import pathlib
import re
import subprocess
import tempfile

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
SETTINGS = """
PROJECT_NAME = brigade
PROJECT_BRIEF = "C++ reference"
INPUT = brigade
RECURSIVE = YES
STRIP_FROM_PATH = .
STRIP_FROM_INC_PATH = .
GENERATE_LATEX = NO
HAVE_DOT = NO
EXTRACT_ALL = YES
JAVADOC_AUTOBRIEF = YES
VERBATIM_HEADERS = NO
DISABLE_INDEX = NO
HTML_EXTRA_STYLESHEET = dark.css
QUIET = YES
WARNINGS = NO
"""
DARK = """
@media (prefers-color-scheme: dark) {
  html { background: #fff; filter: invert(0.9) hue-rotate(180deg); }
}
"""

_folder = tempfile.TemporaryDirectory()


def public_headers() -> list[str]:
    """brigade.h and every header that it includes, directly or not."""
    headers = ["brigade.h"]
    for header in headers:
        included = re.findall(r'^#include "brigade/(.+)"', (ROOT / header).read_text(), re.M)
        headers += [name for name in included if name not in headers]
    return headers


def with_doxygen_comments(code: str) -> str:
    """Doxygen reads `///`, and `///<` after a declaration; our headers have `//`."""
    code = re.sub(r"^ *// ----.*$", "", code, flags=re.M)
    code = re.sub(r"^( *)//(?= |$)", r"\1///", code, flags=re.M)
    return re.sub(r"(?<=[;,{}])  // ", "  ///< ", code)


def on_files(files, config):
    """Adds the C++ reference, made by Doxygen; mkdocs then checks links to it."""
    folder = pathlib.Path(_folder.name)
    for header in public_headers():
        copy = folder / "brigade" / header
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(with_doxygen_comments((ROOT / header).read_text()))
    (folder / "dark.css").write_text(DARK)
    subprocess.run(["doxygen", "-"], input=SETTINGS, text=True, check=True, cwd=folder)
    for page in sorted((folder / "html").rglob("*")):
        if page.is_file():
            name = f"reference/cpp/{page.relative_to(folder / 'html')}"
            files.append(File.generated(config, name, abs_src_path=str(page)))
    return files


def shown_table(name: str) -> str:
    with (ROOT / "docs" / name).open(newline="") as file:
        header, *rows = csv.reader(file)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def on_page_markdown(markdown, page, config, files):
    """Shows linked tables, and drops the names of test programs in fences ("python late")."""
    markdown = re.sub(
        r"^\[Table\]\((.+\.csv)\)$", lambda m: shown_table(m[1]), markdown, flags=re.M
    )
    return re.sub(r"^```(\w+) [\w-]+$", r"```\1", markdown, flags=re.M)
