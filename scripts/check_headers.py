"""Syntax check of brigade's library and bindings against another torch's headers.

    .venv/bin/python scripts/check_headers.py [VERSION]

VERSION: 2.12 or 2.12.1, for example; default: the oldest in cmake/torch_versions.json. Finds
missing or renamed interfaces; `scripts/test.sh --torch` finds different behaviour. Does not check
tests, examples or CUDA files.

The headers come from torch's wheel for macOS, which has the same headers as Linux's in 90 MB
instead of 500. They are cached in .cache/.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "headers"
PIP = "install --quiet --disable-pip-version-check --no-deps --only-binary=:all:"
PIP += " --platform=macosx_15_0_arm64 --python-version=3.11 --target"


def fetch_headers(version: str) -> pathlib.Path:
    """Returns the include folder of torch's wheel, downloading it if it is not in .cache/."""
    folder = ROOT / ".cache" / f"torch-headers-{version}"
    if not (folder / "torch").exists():
        requirement = f"torch=={version}" + (".*" if version.count(".") == 1 else "")
        print(f"headers: downloading {requirement}", flush=True)
        command = [sys.executable, "-m", "pip", *PIP.split(), folder, requirement]
        subprocess.run(command, check=True)
    return folder / "torch" / "include"


def compiles(entry: dict[str, str], include: pathlib.Path) -> bool:
    """Checks the syntax of a file of CMake's compile_commands.json, with torch's `include`."""
    words = re.sub(r"\S+/torch/include(?=[ /])", str(include), entry["command"])
    return subprocess.run([*shlex.split(words), "-fsyntax-only", "-w"], cwd=BUILD).returncode == 0


def main() -> None:
    versions = json.loads((ROOT / "cmake" / "torch_versions.json").read_text())
    version = sys.argv[1] if len(sys.argv) > 1 else versions["supported"][0]
    include = fetch_headers(version)
    off = [f"-DBRIGADE_{name}=OFF" for name in ("PCH", "CUDA", "BUILD_TESTS", "BUILD_EXAMPLES")]
    configure = ["cmake", "--preset", "release", "-B", BUILD, *off]
    subprocess.run(configure, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    entries = json.loads((BUILD / "compile_commands.json").read_text())
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        good = list(pool.map(lambda entry: compiles(entry, include), entries))
    wrong = [entry["file"] for entry, is_good in zip(entries, good, strict=True) if not is_good]
    print(f"headers: {len(entries)} files checked against torch {version}, {len(wrong)} failed")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
