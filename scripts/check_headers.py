"""Syntax check of brigade's library and bindings against another torch's headers.

    .venv/bin/python scripts/check_headers.py [VERSION]

VERSION: 2.12 or 2.12.1, for example; default: the oldest in cmake/torch_versions.json. Finds
missing or renamed interfaces; `scripts/test.sh --torch` finds different behaviour. Does not check
tests, examples or CUDA files.

The headers come from torch's wheel for macOS, which has the same headers as Linux's in 90 MB
instead of 500. They are cached in .cache/.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SETTINGS = ("PCH", "CUDA", "BUILD_TESTS", "BUILD_EXAMPLES")


def fetch_headers(version: str) -> pathlib.Path:
    """Returns the include folder of torch's wheel, downloading it if it is not in .cache/."""
    folder = ROOT / ".cache" / f"torch-headers-{version}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        requirement = f"torch=={version}" + (".*" if version.count(".") == 1 else "")
        print(f"headers: downloading {requirement}", flush=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as download:
            choice = ["--no-deps", "--only-binary=:all:", "--platform=macosx_15_0_arm64"]
            choice += ["--python-version=3.11", f"--dest={download}", requirement]
            pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
            subprocess.run(pip + choice, check=True)
            (wheel,) = pathlib.Path(download).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                headers = [name for name in archive.namelist() if name.startswith("torch/include/")]
                archive.extractall(f"{download}/headers", headers)
            os.rename(f"{download}/headers", folder)
    return folder / "torch" / "include"


def compile_commands(include: pathlib.Path) -> dict[str, list[str]]:
    """Returns each file's command of CMake, changed to check the syntax with `include`."""
    folder = ROOT / "build" / "headers"
    off = [f"-DBRIGADE_{name}=OFF" for name in SETTINGS]
    configure = ["cmake", "--preset", "release", "-B", folder, *off]
    subprocess.run(configure, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    commands = {}
    for entry in json.loads((folder / "compile_commands.json").read_text()):
        words = re.sub(r"\S+/torch/include(?=[ /])", str(include), entry["command"])
        commands[entry["file"]] = [*shlex.split(words), "-fsyntax-only", "-w"]
    return commands


def compiles(command: list[str]) -> bool:
    return subprocess.run(command, cwd=ROOT / "build" / "headers").returncode == 0


def main() -> None:
    versions = json.loads((ROOT / "cmake" / "torch_versions.json").read_text())
    version = sys.argv[1] if len(sys.argv) > 1 else versions["supported"][0]
    commands = compile_commands(fetch_headers(version))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        good = list(pool.map(compiles, commands.values()))
    wrong = [file for file, is_good in zip(commands, good, strict=True) if not is_good]
    print(f"headers: {len(commands)} files checked against torch {version}, {len(wrong)} failed")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
