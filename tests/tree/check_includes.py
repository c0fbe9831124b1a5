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
# and libraries, named by how an include of theirs begins.
LIBTORCH = ("torch/", "ATen/", "c10/")
LAYERS = {
    "planning": ((), ()),
    "hooks": (("planning",), LIBTORCH),
    "comm": ((), LIBTORCH + ("gloo/", "nccl.h", "cuda")),
    "comm_hooks": (("comm",), LIBTORCH),
    "engine": (("planning", "hooks", "comm", "comm_hooks"), LIBTORCH + ("cuda",)),
    "reducer": (("engine",), LIBTORCH),
    "fsdp": (("engine",), LIBTORCH + ("nlohmann/",)),
    "ddp": (("reducer",), LIBTORCH),
    "bucket_sweep": (("reducer",), LIBTORCH),
    "python_bindings": (("ddp", "fsdp"), LIBTORCH + ("pybind11/",)),
}
# Libraries that an otherwise allowed prefix does not cover.
FORBIDDEN = {"hooks": ("torch/csrc/distributed/",)}

EVERYWHERE = ("absl/",)
SOURCES = {".h", ".cc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# A standard header (<vector>, <cstdint>) or one of the system (<unistd.h>, <sys/wait.h>).
STANDARD = re.compile(r"^(\w+|\w+\.h|(sys|netinet|arpa|net|linux)/\w+\.h)$")


def reachable(folder: str) -> set[str]:
    """The folder itself and every folder that it may include."""
    found = {folder}
    for below in LAYERS[folder][0]:
        found |= reachable(below)
    return found


def libraries(folder: str) -> tuple[str, ...]:
    return EVERYWHERE + sum((LAYERS[below][1] for below in sorted(reachable(folder))), ())


def complaint(root: pathlib.Path, folder: str, quote: str, target: str) -> str:
    """Why `folder` may not include `target`, or ''."""
    if target.startswith("brigade/"):
        other = target.split("/")[1]
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
    for folder in LAYERS:
        for file in (root / folder).rglob("*"):
            if file.suffix in SOURCES:
                own = needs.setdefault(str(file.relative_to(root).with_suffix("")), set())
                for line in file.read_text().splitlines():
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
    for folder in LAYERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix not in SOURCES:
                continue
            for number, line in enumerate(file.read_text().splitlines(), 1):
                match = INCLUDE.match(line)
                if match and (why := complaint(root, folder, *match.groups())):
                    complaints.append(f"{file.relative_to(root)}:{number}: {line.strip()}: {why}")
    if circle := find_circle(root):
        complaints.append(" needs ".join(circle))
    return complaints


def main() -> int:
    complaints = check(pathlib.Path(sys.argv[1]))
    print("\n".join(complaints) if complaints else "every folder includes only what it may, and no two files need each other")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
