"""Configures and builds projects whose list files are the CMake blocks of docs/guides/cmake.md.

    use_from_cmake.py <case> <build folder> <LibTorch> <work folder>

The project's program is the README's first. Cases:
    installed      installs brigade; builds and runs the program, which also finds Torch
    other-version  expects the page's error for a LibTorch of another minor version
    in-tree        adds brigade's sources as a subdirectory and compiles the program only

Exits with 77, ctest's code for skipped, if torch's CMake package needs a missing CUDA toolkit.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

from page_blocks import DOCS, blocks_of

SOURCE = DOCS.parent
CMAKE = os.environ.get("CMAKE_COMMAND", "cmake")
SKIPPED = 77
# The error of torch's CMake package if LibTorch has CUDA and the machine has no toolkit.
NO_TOOLKIT = "uses CUDA but I cannot find the CUDA libraries"
# The page's examples of the versions and the folder, which the test replaces.
PAGE_BUILT_AGAINST, PAGE_FOUND, PAGE_FOLDER = "2.15", "2.14.1", "/opt/libtorch"


def block(language: str, use: str = "") -> str:
    """Returns the page's only block of that language and use."""
    (found,) = [b for b in blocks_of(DOCS / "guides/cmake.md") if (b.language, b.use) == (language, use)]
    return found.code


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def make_project(folder: pathlib.Path, list_file: str) -> pathlib.Path:
    folder.mkdir()
    program = next(b for b in blocks_of(SOURCE / "README.md") if b.language == "cpp")
    (folder / "trainer.cc").write_text(program.code)
    (folder / "CMakeLists.txt").write_text(list_file)
    return folder


def run(*command) -> None:
    print(*command, flush=True)
    subprocess.run(command, check=True)


def configure(project: pathlib.Path, *settings: str) -> "tuple[bool, str]":
    """Configures <project>/build. Returns whether that succeeded, and the output."""
    done = subprocess.run(
        [CMAKE, "-S", project, "-B", project / "build", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout, flush=True)
    return done.returncode == 0, done.stdout


def install(build: pathlib.Path, work: pathlib.Path) -> pathlib.Path:
    run(CMAKE, "--install", build, "--prefix", work / "prefix")
    return work / "prefix"


def train(program: pathlib.Path) -> None:
    """Runs the program on one rank."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [program], env={**os.environ, **ranks}, check=True, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, flush=True)
    assert done.stdout.startswith("rank 0 learned the weights")


def find_in_two_folders(folder: pathlib.Path, prefix: pathlib.Path) -> None:
    """Checks that two subdirectories may each call find_package(brigade)."""
    parts = ("one", "other")
    for part in parts:
        (folder / part).mkdir(parents=True)
        (folder / part / "CMakeLists.txt").write_text("find_package(brigade 0.1 REQUIRED)\n")
    head = "cmake_minimum_required(VERSION 3.23)\nproject(two LANGUAGES CXX)\n"
    adds = "".join(f"add_subdirectory({part})\n" for part in parts)
    (folder / "CMakeLists.txt").write_text(head + adds)
    is_configured, _ = configure(folder, f"-DCMAKE_PREFIX_PATH={prefix}")
    assert is_configured


def use_installed(build: pathlib.Path, torch: pathlib.Path, work: pathlib.Path) -> None:
    prefix = install(build, work)
    project = make_project(work / "project", block("cmake"))
    # C++20 comes with brigade::ddp.
    settings = [f"-DCMAKE_PREFIX_PATH={prefix};{torch}", "-DCMAKE_CXX_STANDARD=17"]
    is_configured, output = configure(project, *settings)
    if NO_TOOLKIT in in_one_line(output):
        print("SKIPPED: torch's CMake package needs a CUDA toolkit, which this machine lacks")
        sys.exit(SKIPPED)
    assert is_configured
    find_in_two_folders(work / "two", prefix)
    run(CMAKE, "--build", project / "build")
    train(project / "build" / "trainer")


def make_torch(folder: pathlib.Path, version: str) -> None:
    """Writes a fake LibTorch of that version, and a CMake package that finds it."""
    header = folder / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    header.write_text("".join(f"#define TORCH_VERSION_{name} {n}\n" for name, n in numbers))
    (folder / "lib").mkdir()
    for name in ("libtorch_cpu.so", "libtorch.so", "libc10.so"):
        (folder / "lib" / name).touch()
    package = folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    package.parent.mkdir(parents=True)
    package.write_text(f"set(TORCH_INSTALL_PREFIX {folder})\nset(TORCH_LIBRARIES)\n")


def use_other_version(build: pathlib.Path, torch: pathlib.Path, work: pathlib.Path) -> None:
    prefix = install(build, work)
    header = (torch / "include" / "torch" / "headeronly" / "version.h").read_text()
    major, minor = (re.search(rf"VERSION_{n} (\d+)", header)[1] for n in ("MAJOR", "MINOR"))
    other = f"{major}.{int(minor) - 1}.1"
    make_torch(work / "torch", other)
    settings = [f"-DCMAKE_PREFIX_PATH={prefix};{work / 'torch'}"]

    here = {PAGE_BUILT_AGAINST: f"{major}.{minor}", PAGE_FOUND: other, PAGE_FOLDER: work / "torch"}
    words = in_one_line(block("text"))
    assert all(name in words for name in here), f"the page's error lacks one of {list(here)}"
    names = "|".join(map(re.escape, here))
    words = re.sub(names, lambda match: str(here[match[0]]), words)

    # Below 3.21 (policy CMP0126) a cache entry would override the list file's variable.
    for policies in ("3.23", "3.18"):
        list_file = block("cmake").replace("VERSION 3.23", f"VERSION {policies}")
        is_configured, output = configure(make_project(work / policies, list_file), *settings)
        assert not is_configured
        assert words in in_one_line(output), f"the error differs from the page's:\n{words}"


def use_in_tree(build: pathlib.Path, torch: pathlib.Path, work: pathlib.Path) -> None:
    project = make_project(work / "project", block("cmake", "in-tree"))
    (project / "third_party").mkdir()
    (project / "third_party" / "brigade").symlink_to(SOURCE)
    settings = [f"-DBRIGADE_LIBTORCH={torch}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    is_configured, _ = configure(project, *settings)
    assert is_configured
    commands = json.loads((project / "build" / "compile_commands.json").read_text())
    files = [pathlib.Path(command["file"]) for command in commands]
    brigade = project / "third_party" / "brigade"
    folders = {file.relative_to(brigade).parts[0] for file in files if brigade in file.parents}
    assert "ddp" in folders, folders
    assert folders.isdisjoint({"tests", "examples", "python_bindings"}), folders
    compile_trainer = commands[files.index(project / "trainer.cc")]
    print(compile_trainer["command"], flush=True)
    subprocess.run(
        compile_trainer["command"], shell=True, cwd=compile_trainer["directory"], check=True
    )


def main() -> None:
    case, *folders = sys.argv[1:]
    build, torch, work = (pathlib.Path(folder).absolute() for folder in folders)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    uses = {"installed": use_installed, "other-version": use_other_version, "in-tree": use_in_tree}
    uses[case](build, torch, work)


if __name__ == "__main__":
    main()
