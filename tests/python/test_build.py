"""The package's build: its choice of torch, and its errors without a supported one."""

import importlib.metadata
import importlib.util
import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest
import torch

pytest.importorskip("scikit_build_core", reason="No module named 'scikit_build_core'")

ROOT = pathlib.Path(__file__).resolve().parents[2]
INSTALLED = pathlib.Path(torch.__file__).parent


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "python_bindings"))
    monkeypatch.delitem(sys.modules, "torch_wheel", raising=False)
    monkeypatch.chdir(ROOT)  # the folder in which build front ends run
    yield load(ROOT / "python_bindings" / "build_backend.py")
    sys.modules.pop("torch_wheel", None)


def install_torch(folder, version):
    header = folder / "torch" / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    major, minor = version.split(".")
    header.write_text(f"#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {minor}\n")
    return folder / "torch"


@pytest.fixture
def site_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_the_build_uses_the_installed_torch_and_does_not_require_another(backend):
    assert not any("torch" in required for required in backend.get_requires_for_build_wheel())
    settings = backend._with_torch(None)
    assert settings == {"cmake.define.BRIGADE_LIBTORCH": str(INSTALLED)}
    assert backend.torch_wheel.chosen == INSTALLED
    assert torch.__version__.startswith(backend.torch_wheel.minor_version(INSTALLED) + ".")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_missing_torch_is_an_error_before_the_build(backend, site_packages, kind):
    ask = getattr(backend, f"get_requires_for_build_{kind}")
    with pytest.raises(RuntimeError) as error:
        ask()
    text = str(error.value)
    assert f"found none in {site_packages}" in text
    assert f"pip install torch=={backend.torch_wheel.pinned()}" in text


def test_an_unsupported_torch_is_an_error_that_names_it(backend, site_packages):
    folder = install_torch(site_packages, "2.7")
    with pytest.raises(RuntimeError, match=re.escape(f"found version 2.7 in {folder}")):
        backend.get_requires_for_build_wheel()


def test_the_build_uses_the_users_libtorch(backend, site_packages):
    folder = install_torch(site_packages / "own", "2.13")
    settings = {"cmake.define.BRIGADE_LIBTORCH": str(folder)}
    backend.get_requires_for_build_wheel(settings)
    assert backend._with_torch(settings) == settings
    assert backend.torch_wheel.chosen == folder


def test_importing_with_another_torch_is_an_error_that_names_it():
    program = "import torch; torch.__version__ = '2.1.0+cpu'; import brigade"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode != 0
    built_with = ".".join(torch.__version__.split(".")[:2])
    assert f"built with torch {built_with}, found torch 2.1.0+cpu" in run.stderr
    assert f"Install torch=={built_with}.*" in run.stderr
