"""Counts the instructions that a reducer adds per parameter and step, with callgrind.

    python benchmarks/count_instructions.py build/release/benchmarks/training_steps

Unlike times these counts repeat, on any machine. Each figure is the difference
of two runs of different lengths, so that what happens once drops out, less that
of the same steps without a reducer.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

MODES = ("copies", "views", "find_unused", "static_graph")
FEW_STEPS, MANY_STEPS = 10, 40


def count(program: Path, mode: str, parameters: int, steps: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        command += [program, "--mode", mode]
        command += ["--parameters", str(parameters), "--steps", str(steps)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if collected is None:
        raise RuntimeError(f"callgrind printed no count:\n{done.stderr}")
    return int(collected[1])


def count_per_parameter(program: Path, mode: str, parameters: int) -> float:
    few, many = (count(program, mode, parameters, steps) for steps in (FEW_STEPS, MANY_STEPS))
    return (many - few) / (MANY_STEPS - FEW_STEPS) / parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="training_steps as built by CMake")
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    arguments = parser.parse_args()
    alone = count_per_parameter(arguments.program, "alone", arguments.parameters)
    print(f"{arguments.parameters} parameters of 4 elements, instructions per parameter and step")
    print(f"{'training alone':18}{alone:10.0f}")
    for mode in arguments.modes:
        added = count_per_parameter(arguments.program, mode, arguments.parameters) - alone
        print(f"{mode:18}{added:+10.0f}")


if __name__ == "__main__":
    main()
