"""Holds the layering of brigade's folders: reads #include lines, compiles nothing.

    check_includes.py <repository root>

prints one line for each include that a folder may not have, and exits with 1 if
there is any.
"""

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
    return complaints


def main() -> int:
    complaints = check(pathlib.Path(sys.argv[1]))
    print("\n".join(complaints) if complaints else "every folder includes only what it may")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
