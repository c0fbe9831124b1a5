"""Checks the syntax of brigade's library and bindings against another torch's headers.

    .venv/bin/python scripts/check_headers.py [VERSION]

VERSION: such as 2.12 or 2.12.1; default the oldest that cmake/torch_versions.json
supports. Compiles no code and links nothing: it finds what a version's interface
lacks or names otherwise, and not what behaves otherwise (`scripts/test.sh --torch`
does). What is built on the library, tests too, and CUDA's files are left out.

The headers come from torch's wheel for macOS, which has them as Linux's wheel has,
in 90 MB instead of 500, and are kept in .cache/.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SETTINGS = ("PCH", "CUDA", "BUILD_TESTS", "BUILD_BENCHMARKS", "BUILD_EXAMPLES")


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


def compile_commands(include: pathlib.Path) -> dict[str, list[str]]:
    """By file, as CMake would compile it, for the syntax only and with `include`."""
    folder = ROOT / "build" / "headers"
    off = [f"-DBRIGADE_{name}=OFF" for name in SETTINGS]
    configure = ["cmake", "--preset", "release", "-B", folder, *off]
    subprocess.run(configure, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    commands = {}
    for entry in json.loads((folder / "compile_commands.json").read_text()):
        words = re.sub(r"\S+/torch/include(?=[ /])", str(include), entry["command"])
        commands[entry["file"]] = [*shlex.split(words), "-fsyntax-only", "-w"]
    return commands


def words_of(command: list[str]) -> str:
    """What the compiler says of a file that does not compile."""
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "build" / "headers")
    return "" if result.returncode == 0 else result.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", nargs="?", default=oldest_supported())
    version = parser.parse_args().version
    include = fetch_headers(version)
    begin = time.monotonic()
    commands = compile_commands(include)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        words = dict(zip(commands, pool.map(words_of, commands.values()), strict=True))
    wrong = [file for file, text in words.items() if text]
    print("".join(words.values()), end="")
    print(
        f"headers: {len(commands)} files read against torch {version}'s in "
        f"{time.monotonic() - begin:.0f} s; {len(wrong)} failed"
        + "".join(f"\n    {file}" for file in wrong)
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
