"""Writes the type stub of the extension module brigade._C from the built module.

    PYTHONPATH=<build>/python python python_bindings/make_stub.py [FILE]

FILE defaults to python_bindings/brigade/_C.pyi, which is committed. A test compares it with the
built module. The stub has the names of the public interface; all others have the type Any. It
does not depend on the version of torch, whose pybind11 writes signatures.
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
_PUBLIC = ("GatherTimes", "ReductionTimes", "Reducer", "ShardingTimeline", "then_collective")
_PRIVATE_METHOD = re.compile(r" +def _(?!_).*\n")


def normalized(stub: str) -> str:
    """Returns the stub in a form that does not depend on pybind11's version.

    Removes docstrings, which help() shows, and private names; puts empty bodies on the line of
    the signature; turns properties into attributes.
    """
    stub = _DOCSTRING.sub("", _OR_INDEX.sub(r"\1", stub))
    stub = _PROPERTY.sub(r"\1\2: \3\n", _EMPTY_BODY.sub(r"\1: ...\n", stub))
    head, *parts = re.split(r"(?m)^(?=__all__|class |def )", _PRIVATE_METHOD.sub("", stub))
    kept = [part for part in parts if re.split(r"\W", part)[1] in _PUBLIC]
    return "".join([head, *kept, "def __getattr__(name: str) -> typing.Any: ...\n"])


def main() -> None:
    target = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else STUB
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "brigade._C", "--output-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        text = (pathlib.Path(folder) / "brigade" / "_C.pyi").read_text()
    target.write_text(normalized(text))


if __name__ == "__main__":
    main()
