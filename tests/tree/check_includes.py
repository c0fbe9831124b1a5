"""Include rules of brigade's folders and files, checked by reading #include lines.

A folder includes only the folders and libraries that LAYERS allows. Files do not include
each other in a cycle; a header and its source count as one file.

    check_includes.py <repository root>

prints one line per forbidden include and one per cycle, and exits with 1 if there is any.
"""

import graphlib
import pathlib
import re
import sys

# Per folder: the folders of brigade that it may include, directly or through others,
# and its libraries, by the prefix of their includes. An entry applies to a folder's own
# files, not to its subfolders.
LIBTORCH = ("torch/", "ATen/", "c10/")
LAYERS = {
    "planning": ((), ()),
    "simulation": (("planning",), ("nlohmann/",)),
    "hooks": (("planning",), LIBTORCH),
    "comm/errors": ((), LIBTORCH),
    "comm/streams": ((), LIBTORCH),
    "comm/group": (("comm/errors",), LIBTORCH),
    "comm/backends": (("comm/group", "comm/streams"), LIBTORCH + ("gloo/",)),
    "comm/ordered": (("comm/backends", "comm/streams"), LIBTORCH),
    # Statuses are exchanged over subgroups.
    "comm/status": (("comm",), LIBTORCH),
    "comm": (("comm/status", "comm/ordered"), LIBTORCH),
    "checkpoint": (("comm",), LIBTORCH + ("nlohmann/",)),
    "comm_hooks": (("comm/ordered",), LIBTORCH),
    "observing": (("planning", "comm/group", "comm/streams"), LIBTORCH + ("nlohmann/",)),
    "reducer/packing": ((), LIBTORCH + ("cuda",)),
    "reducer": (("reducer/packing", "observing", "hooks", "comm_hooks", "comm"), LIBTORCH),
    "fsdp": (("observing", "hooks", "comm_hooks", "checkpoint"), LIBTORCH),
    "ddp": (("reducer",), LIBTORCH),
    "bucket_sweep": (("reducer",), LIBTORCH + ("nlohmann/",)),
    "python_bindings": (("bucket_sweep", "fsdp", "simulation"), LIBTORCH + ("pybind11/",)),
}
# Exceptions to the allowed prefixes.
FORBIDDEN = {"hooks": ("torch/csrc/distributed/",)}

EVERYWHERE = ("absl/",)
SOURCES = {".h", ".cc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# A standard header (<vector>, <cstdint>) or a system header (<unistd.h>, <sys/wait.h>).
STANDARD = re.compile(r"^(\w+|\w+\.h|(sys|netinet|arpa|net|linux)/\w+\.h)$")


def folder_of(file: pathlib.Path | str) -> str:
    """Returns the folder of a file if it is in LAYERS, else ''."""
    parent = str(pathlib.Path(file).parent)
    return parent if parent in LAYERS else ""


def sources(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the source files of all folders, relative to the root."""
    return sorted(
        file.relative_to(root)
        for folder in LAYERS
        if "/" not in folder
        for file in (root / folder).rglob("*")
        if file.suffix in SOURCES
    )


def reachable(folder: str) -> set[str]:
    """Returns the folder itself and every folder that it may include."""
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


def violation(root: pathlib.Path, folder: str, quote: str, target: str) -> str:
    """Returns why `folder` may not include `target`, or '' if it may."""
    if target.startswith("brigade/"):
        other = folder_of(target.removeprefix("brigade/"))
        if other not in reachable(folder):
            return f"{folder}/ may include only {', '.join(sorted(reachable(folder)))}"
        if not (root / target.removeprefix("brigade/")).is_file():
            return "no such file"
        return ""
    if target.startswith(FORBIDDEN.get(folder, ())):
        return f"{folder}/ may not include it"
    if target.startswith(libraries(folder)):
        return ""
    if quote == '"':
        return 'expected "brigade/<folder>/<file>.h"'
    if STANDARD.match(target) and not target.startswith(("nccl", "cuda")):
        return ""
    return f"{folder}/ may include only {', '.join(libraries(folder))} and standard headers"


def find_cycle(root: pathlib.Path) -> list[str]:
    """Returns a cycle of files, without suffixes, that begins and ends with the same file; [] if none."""
    includes: dict[str, set[str]] = {}
    for file in sources(root):
        own = includes.setdefault(str(file.with_suffix("")), set())
        for line in (root / file).read_text().splitlines():
            match = INCLUDE.match(line)
            if match and match[2].startswith("brigade/"):
                own.add(str(pathlib.Path(match[2].removeprefix("brigade/")).with_suffix("")))
    for name, own in includes.items():
        own.discard(name)
    try:
        graphlib.TopologicalSorter(includes).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return []


def check(root: pathlib.Path) -> list[str]:
    violations = []
    for file in sources(root):
        folder = folder_of(file)
        if not folder:
            violations.append(f"{file}: its folder is not in LAYERS")
            continue
        for number, line in enumerate((root / file).read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if match and (why := violation(root, folder, *match.groups())):
                violations.append(f"{file}:{number}: {line.strip()}: {why}")
    if cycle := find_cycle(root):
        violations.append(" includes ".join(cycle))
    return violations


def main() -> int:
    violations = check(pathlib.Path(sys.argv[1]))
    print("\n".join(violations) if violations else "all includes follow the rules")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
