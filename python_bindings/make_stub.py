"""Writes the type stub of the extension module, from the module itself.

    PYTHONPATH=<build>/python python python_bindings/make_stub.py [FILE]

FILE: default python_bindings/brigade/_C.pyi, which is committed; a test compares it
with the module that was built.
"""

import pathlib
import subprocess
import sys
import tempfile

STUB = pathlib.Path(__file__).parent / "brigade" / "_C.pyi"


def main() -> None:
    target = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else STUB
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", "brigade._C", "--output-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        text = (pathlib.Path(folder) / "brigade" / "_C.pyi").read_text()
    target.write_text(text)


if __name__ == "__main__":
    main()
