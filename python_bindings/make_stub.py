"""Writes the type stub of the extension module brigade._C from the built module.

    PYTHONPATH=<build>/python python python_bindings/make_stub.py [FILE]

FILE defaults to python_bindings/brigade/_C.pyi, which is committed. A test compares it with the
built module. The stub does not depend on the version of torch, whose pybind11 writes signatures.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

STUB = pathlib.Path(__file__).parent / "brigade" / "_C.pyi"

# Only pybind11 3.1 and later declare that numbers may be indices.
_OR_INDEX = re.compile(r"(typing\.Supports(?:Int|Float)) \| typing\.SupportsIndex")
_DOCSTRING = re.compile(r' +"""\n.*?"""\n', re.DOTALL)
_EMPTY_BODY = re.compile(r"(def .*):\n(?: +\.\.\.\n)?")
_PROPERTY = re.compile(
    r"( +)@property\n +def (\w+)\(self\) -> (.*): \.\.\.\n(?: +@\2\.setter\n.*\n)?"
)


def normalized(stub: str) -> str:
    """Returns the stub in a form that does not depend on pybind11's version.

    Removes docstrings, which help() shows; puts empty bodies on the line of the signature; turns
    properties into attributes.
    """
    stub = _DOCSTRING.sub("", _OR_INDEX.sub(r"\1", stub))
    return _PROPERTY.sub(r"\1\2: \3\n", _EMPTY_BODY.sub(r"\1: ...\n", stub))


def main() -> None:
    target = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else STUB
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "brigade._C", "--output-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        text = (pathlib.Path(folder) / "brigade" / "_C.pyi").read_text()
    target.write_text(normalized(text))


if __name__ == "__main__":
    main()
