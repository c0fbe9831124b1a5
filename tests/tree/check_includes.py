"""Holds the layering of brigade's folders and files: reads #include lines, compiles nothing.

A folder includes only what LAYERS says. No two files need each other, by way of others
either: a header and its source count as one, so that one job can be read, tested and
replaced without the other.

    check_includes.py <repository root>

prints one line for each include that a folder may not have, and for a circle of files,
and exits with 1 if there is any.
"""

import graphlib
import pathlib
import re
import sys

# What each folder may include: folders of brigade (and what those may include),
# and libraries, named by how an include of theirs begins. Of a folder with others
# inside it only its own files are meant: it is their front.
LIBTORCH = ("torch/", "ATen/", "c10/")
LAYERS = {
    "planning": ((), ()),
    "hooks": (("planning",), LIBTORCH),
    "comm/errors": ((), LIBTORCH),
    "comm/streams": ((), LIBTORCH),
    "comm/group": (("comm/errors",), LIBTORCH),
    "comm/backends": (("comm/group", "comm/streams"), LIBTORCH + ("gloo/",)),
    "comm/ordered": (("comm/backends", "comm/streams"), LIBTORCH),
    # Statuses travel over subgroups.
    "comm/status": (("comm",), LIBTORCH),
    "comm": (("comm/status", "comm/ordered"), LIBTORCH),
    "checkpoint": (("comm",), LIBTORCH + ("nlohmann/",)),
    "comm_hooks": (("comm/ordered",), LIBTORCH),
    "observing": (("planning", "comm/group", "comm/streams"), LIBTORCH),
    "reducer/packing": ((), LIBTORCH + ("cuda",)),
    "reducer": (("reducer/packing", "observing", "hooks", "comm_hooks", "comm"), LIBTORCH),
    "fsdp": (("observing", "hooks", "comm_hooks", "checkpoint"), LIBTORCH),
    "ddp": (("reducer",), LIBTORCH),
    "bucket_sweep": (("reducer",), LIBTORCH + ("nlohmann/",)),
    "python_bindings": (("bucket_sweep", "fsdp"), LIBTORCH + ("pybind11/",)),
}
# Libraries that an otherwise allowed prefix does not cover.
FORBIDDEN = {"hooks": ("torch/csrc/distributed/",)}

EVERYWHERE = ("absl/",)
SOURCES = {".h", ".cc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# A standard header (<vector>, <cstdint>) or one of the system (<unistd.h>, <sys/wait.h>).
STANDARD = re.compile(r"^(\w+|\w+\.h|(sys|netinet|arpa|net|linux)/\w+\.h)$")


def folder_of(file: pathlib.Path | str) -> str:
    """The folder that a file lies in, as LAYERS names it; '' if that is none."""
    parent = str(pathlib.Path(file).parent)
    return parent if parent in LAYERS else ""


def sources(root: pathlib.Path) -> list[pathlib.Path]:
    """Those of all folders and of what is inside of them, from the root."""
    return sorted(
        file.relative_to(root)
        for folder in LAYERS
        if "/" not in folder
        for file in (root / folder).rglob("*")
        if file.suffix in SOURCES
    )


def reachable(folder: str) -> set[str]:
    """The folder itself and every folder that it may include."""
    found = set()
    folders = [folder]
    while folders:
        folder = folders.pop()
        if folder not in found:
            found.add(folder)
            folders += LAYERS[folder][0]
    return found


def libraries(folder: str) -> tuple[str, ...]:
    return EVERYWHERE + sum((LAYERS[below][1] for below in sorted(reachable(folder))), ())


def complaint(root: pathlib.Path, folder: str, quote: str, target: str) -> str:
    """Why `folder` may not include `target`, or ''."""
    if target.startswith("brigade/"):
        other = folder_of(target.removeprefix("brigade/"))
        if other not in reachable(folder):
            return f"{folder}/ may include only {', '.join(sorted(reachable(folder)))}"
        if not (root / target.removeprefix("brigade/")).is_file():
            return "there is no such file"
        return ""
    if target.startswith(FORBIDDEN.get(folder, ())):
        return f"{folder}/ may not include it"
    if target.startswith(libraries(folder)):
        return ""
    if quote == '"':
        return 'an include of this repository reads "brigade/<folder>/<file>.h"'
    if STANDARD.match(target) and not target.startswith(("nccl", "cuda")):
        return ""
    return f"{folder}/ may include only {', '.join(libraries(folder))} and standard headers"


def find_circle(root: pathlib.Path) -> list[str]:
    """Files without suffixes, each of which needs the next; the first once more at the end."""
    needs: dict[str, set[str]] = {}
    for file in sources(root):
        own = needs.setdefault(str(file.with_suffix("")), set())
        for line in (root / file).read_text().splitlines():
            match = INCLUDE.match(line)
            if match and match[2].startswith("brigade/"):
                own.add(str(pathlib.Path(match[2].removeprefix("brigade/")).with_suffix("")))
    for name, own in needs.items():
        own.discard(name)
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def check(root: pathlib.Path) -> list[str]:
    complaints = []
    for file in sources(root):
        folder = folder_of(file)
        if not folder:
            complaints.append(f"{file}: LAYERS has no such folder")
            continue
        for number, line in enumerate((root / file).read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if match and (why := complaint(root, folder, *match.groups())):
                complaints.append(f"{file}:{number}: {line.strip()}: {why}")
    if circle := find_circle(root):
        complaints.append(" needs ".join(circle))
    return complaints


def main() -> int:
    complaints = check(pathlib.Path(sys.argv[1]))
    print("\n".join(complaints) if complaints else "every folder includes only what it may, and no two files need each other")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
