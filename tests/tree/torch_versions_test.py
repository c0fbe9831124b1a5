"""Tests that all users of cmake/torch_versions.json accept the same versions of torch.

CMake is tested with folders that contain only a LibTorch's version header and library names.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSIONS = json.loads((ROOT / "cmake" / "torch_versions.json").read_text())
SUPPORTED, PINNED = VERSIONS["supported"], VERSIONS["pinned"]

sys.path.insert(0, str(ROOT / "python_bindings"))
import torch_wheel  # noqa: E402

NEWEST_MINOR = int(SUPPORTED[-1].split(".")[1])
TOO_OLD, TOO_NEW = "2.11", f"2.{NEWEST_MINOR + 1}"


def read(name: str) -> str:
    return (ROOT / name).read_text()


def make_libtorch(folder: pathlib.Path, version: str) -> pathlib.Path:
    header = folder / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    header.write_text("".join(f"#define TORCH_VERSION_{name} {n}\n" for name, n in numbers))
    for name in ("libtorch_cpu.so", "libtorch.so", "libc10.so"):
        (folder / "lib").mkdir(exist_ok=True)
        (folder / "lib" / name).touch()
    return folder


class InTemporaryFolder(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)


class FilesTest(unittest.TestCase):

    def test_supported_versions_have_no_gap_and_the_newest_is_pinned(self):
        minors = [int(version.removeprefix("2.")) for version in SUPPORTED]
        self.assertEqual(minors, list(range(minors[0], minors[-1] + 1)))
        self.assertRegex(PINNED, rf"^{re.escape(SUPPORTED[-1])}\.\d+$")

    def test_requirements_name_no_version_of_torch_or_nvcc(self):
        for file in [*ROOT.glob("requirements*.txt"), ROOT / "pyproject.toml"]:
            self.assertNotRegex(file.read_text(), r"(?m)^\W*(torch|cuda-toolkit)\b.*\d", file.name)

    def test_the_build_tool_has_one_version(self):
        (required,) = re.findall(r"scikit-build-core==([\d.]+)", read("pyproject.toml"))
        (installed,) = re.findall(r"scikit-build-core==([\d.]+)", read("requirements-python.txt"))
        self.assertEqual(required, installed)


class ScriptsTest(unittest.TestCase):

    def choose(self, version: str) -> "subprocess.CompletedProcess[str]":
        command = 'source scripts/torch_choice.sh && echo "$torch_requirement $venv $build_prefix"'
        return subprocess.run(
            ["bash", "-euc", command], cwd=ROOT, env={**os.environ, "BRIGADE_TORCH": version},
            capture_output=True, text=True)

    def test_each_version_has_its_own_folders(self):
        for version in ("", PINNED):
            self.assertEqual(self.choose(version).stdout, f"torch=={PINNED} .venv \n")
        for version in SUPPORTED:
            self.assertEqual(self.choose(version).stdout,
                             f"torch=={version}.* .venv-{version} {version}-\n")
        self.assertEqual(self.choose("2.12.1").stdout, "torch==2.12.1 .venv-2.12.1 2.12.1-\n")

    def test_other_versions_are_refused_with_the_list(self):
        for version in (TOO_OLD, TOO_NEW, "2.120", "2.12.x", "2.12; true"):
            chosen = self.choose(version)
            self.assertEqual(chosen.returncode, 2, chosen)
            self.assertIn(f"BRIGADE_TORCH is '{version}'", chosen.stderr)
            self.assertIn(f"brigade supports {', '.join(SUPPORTED)}.", chosen.stderr)


class CMakeTest(InTemporaryFolder):

    def configure(self, version: str, *settings: str) -> str:
        """Returns BrigadeTorch.cmake's message about that version of LibTorch; '' if accepted."""
        torch = make_libtorch(self.folder / f"torch-{version}", version)
        project = self.folder / "project"
        project.mkdir(exist_ok=True)
        (project / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.23)\nproject(p LANGUAGES NONE)\n"
            f"include({ROOT}/cmake/BrigadeTorch.cmake)\n"
            'file(WRITE ${CMAKE_BINARY_DIR}/result "${BRIGADE_TORCH_FOUND} ${BRIGADE_TORCH_MESSAGE}")\n')
        build = self.folder / f"build-{version}"
        subprocess.run(
            [os.environ.get("CMAKE_COMMAND", "cmake"), "-S", project, "-B", build,
             f"-DBRIGADE_LIBTORCH={torch}", *settings],
            check=True, capture_output=True)
        found, message = (build / "result").read_text().split(" ", 1)
        self.assertEqual(found, "OFF" if message else "ON")
        return message

    def test_supported_versions_are_accepted(self):
        for version in SUPPORTED:
            self.assertEqual(self.configure(version + ".7"), "")

    def test_other_versions_are_refused_with_the_range(self):
        for version in (TOO_OLD + ".0", TOO_NEW + ".0", "1.13.0", "3.12.0"):
            said = self.configure(version)
            self.assertIn(f"brigade supports torch {SUPPORTED[0]} to {SUPPORTED[-1]}, but found torch "
                          f"'{version}' at {self.folder}/torch-{version}", said)

    def test_an_installed_brigade_requires_its_minor_version(self):
        built_against = "-DBRIGADE_TORCH_BUILT_AGAINST=2.13.0"
        self.assertEqual(self.configure("2.13.1", built_against), "")
        self.assertIn("this brigade was built against torch 2.13, but found torch '2.14.1'",
                      self.configure("2.14.1", built_against))


class WheelTest(InTemporaryFolder):

    def dependencies(self, state: str) -> "dict[str, list[str]]":
        dependency = torch_wheel.Dependency()
        dependency.build_state(state)
        return dependency.dynamic_metadata({}, {})

    def test_a_wheel_requires_its_minor_version(self):
        torch_wheel.chosen = make_libtorch(self.folder / "a", "2.13.0")
        self.addCleanup(setattr, torch_wheel, "chosen", None)
        self.assertEqual(self.dependencies("wheel"), {"dependencies": ["torch==2.13.*"]})
        self.assertEqual(self.dependencies("sdist"),
                         {"dependencies": [f"torch>={SUPPORTED[0]},<{TOO_NEW}"]})


if __name__ == "__main__":
    unittest.main()
