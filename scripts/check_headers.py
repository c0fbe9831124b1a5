"""Checks the syntax of brigade's library and bindings against another torch's headers.

    .venv/bin/python scripts/check_headers.py [VERSION]

VERSION: such as 2.12 or 2.12.1; default the oldest that cmake/torch_versions.json
supports. Compiles no code and links nothing: it finds what a version's interface
lacks or names otherwise, and not what behaves otherwise (`scripts/test.sh --torch`
does). What is built on the library, tests too, and CUDA's files are left out.

The headers come from torch's wheel for macOS, which has them as Linux's wheel has,
in 90 MB instead of 500, and are kept in .cache/. Reading them takes most of the
time, so source files are read together, as many as have no name in common. What
fails in such company is read again on its own, which decides.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ["planning", "hooks", "comm", "checkpoint", "comm_hooks", "observing", "reducer", "fsdp"]
FOLDERS += ["ddp", "python_bindings"]
# These include headers of CUDA, which torch's wheel for macOS lacks.
_NEEDS_CUDA = re.compile(r"#\s*include\s*<(c10/cuda|ATen/cuda|cuda|nccl)|ProcessGroupNCCL\.hpp")
# What a line that begins in the first column declares: a type, or the name before
# a function's parameters or a variable's initializer.
_DECLARED = re.compile(
    r"(?:class|struct|enum(?: class)?|union)\s+(\w+)|using\s+(\w+)\s*="
    r"|(?!namespace)\w[\w:<>,*& ]*[ *&](\w+)\s*[({=;\[]"
)
_CALLED = re.compile(r"(?<![\w.>:~])([a-z]\w*)\(")


def oldest_supported() -> str:
    return json.loads((ROOT / "cmake" / "torch_versions.json").read_text())["supported"][0]


def fetch_headers(version: str) -> pathlib.Path:
    """Returns the include folder of torch's wheel, from .cache/ if it is there."""
    folder = ROOT / ".cache" / f"torch-headers-{version}"
    if (folder / "complete").exists():
        return folder / "torch" / "include"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    requirement = f"torch=={version}" + (".*" if version.count(".") == 1 else "")
    print(f"headers: fetching those of {requirement}", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as download:
        choice = ["--no-deps", "--only-binary=:all:", "--platform=macosx_15_0_arm64"]
        choice += ["--python-version=3.11", f"--dest={download}", requirement]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        subprocess.run(pip + choice, check=True)
        (wheel,) = pathlib.Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            headers = [name for name in archive.namelist() if name.startswith("torch/include/")]
            archive.extractall(folder, headers)
    (folder / "complete").touch()
    return folder / "torch" / "include"


def source_files() -> list[pathlib.Path]:
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.cc"))
    return [file for file in files if not _NEEDS_CUDA.search(file.read_text())]


class Names:
    """What a source file calls things of its own, and what it calls by a bare name."""

    def __init__(self, text: str = ""):
        # Of an alias the whole line: files may agree on it.
        self.declared: dict[str, str] = {}
        for line in text.splitlines():
            if match := _DECLARED.match(line):
                self.declared[next(filter(None, match.groups()))] = line if match[2] else ""
        self.called = set(_CALLED.findall(text))

    def clash(self, other: Names) -> bool:
        for name in self.declared.keys() & other.declared.keys():
            if not self.declared[name] == other.declared[name] != "":
                return True
        return bool(
            self.called & (other.declared.keys() - self.declared.keys())
            or other.called & (self.declared.keys() - other.declared.keys())
        )

    def add(self, other: Names) -> None:
        self.declared |= other.declared
        self.called |= other.called


def group(files: dict[pathlib.Path, Names]) -> list[list[pathlib.Path]]:
    """Puts each file into the first group that it does not clash with."""
    groups: list[tuple[list[pathlib.Path], Names]] = []
    for file, names in files.items():
        for members, taken in groups:
            if not names.clash(taken):
                members.append(file)
                taken.add(names)
                break
        else:
            groups.append(([file], names))
    return [members for members, _ in groups]


class Compiler:
    """Runs g++ for its opinion of a few files read as one."""

    def __init__(self, include: pathlib.Path, work: pathlib.Path):
        (work / "brigade").symlink_to(ROOT)
        self._command = [
            os.environ.get("CXX", "g++"),
            "-std=c++20",
            "-fsyntax-only",
            "-w",
            "-DUSE_DISTRIBUTED",
            "-DUSE_C10D_GLOO",
            '-DBRIGADE_VERSION=""',
            f"-I{work}",
            f"-isystem{include}",
            f"-isystem{include}/torch/csrc/api/include",
            f"-isystem{sysconfig.get_path('include')}",
            "-xc++",
            "-",
        ]

    def read(self, files: list[pathlib.Path]) -> tuple[list[pathlib.Path], str]:
        """Returns which of `files` seem to be to blame, and the compiler's words."""
        text = "".join(f'#include "brigade/{file.relative_to(ROOT)}"\n' for file in files)
        result = subprocess.run(self._command, input=text, capture_output=True, text=True)
        if result.returncode == 0:
            return [], ""
        named = set(re.findall(r"brigade/(\S+\.cc):\d+:\d+: error", result.stderr))
        blamed = [file for file in files if str(file.relative_to(ROOT)) in named]
        return blamed or files, result.stderr

    def read_group(self, files: list[pathlib.Path]) -> tuple[dict[pathlib.Path, str], int]:
        """Returns what is wrong with each file, if anything, and how many were read alone."""
        wrong, num_alone = {}, 0
        while files:
            blamed, words = self.read(files)
            if len(files) == 1:
                wrong |= dict.fromkeys(blamed, words)
            else:
                num_alone += len(blamed)
                for file in blamed:
                    wrong |= dict.fromkeys(*self.read([file]))
            if not blamed:
                break
            files = [file for file in files if file not in blamed]
        return wrong, num_alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", nargs="?", default=oldest_supported())
    version = parser.parse_args().version
    include = fetch_headers(version)
    begin = time.monotonic()
    groups = group({file: Names(file.read_text()) for file in source_files()})
    wrong, num_alone = {}, 0
    with tempfile.TemporaryDirectory() as work:
        compiler = Compiler(include, pathlib.Path(work))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for wrong_there, num_alone_there in pool.map(compiler.read_group, groups):
                wrong |= wrong_there
                num_alone += num_alone_there
    print("".join(wrong.values()), end="")
    print(
        f"headers: {sum(map(len, groups))} files read against torch {version}'s in "
        f"{len(groups)} groups and {num_alone} alone in {time.monotonic() - begin:.0f} s; "
        f"{len(wrong)} failed" + "".join(f"\n    {file.relative_to(ROOT)}" for file in wrong)
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
