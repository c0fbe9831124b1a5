"""Counts the instructions that a reducer adds per parameter and step, with callgrind.

    python benchmarks/count_instructions.py build/release/benchmarks/training_steps

Unlike times these counts repeat, on any machine. They depend on where things lie
in memory, by a hundredth of what training itself takes, so that each figure is
the mean over several models in one process, less that of the same steps without
a reducer.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

MODES = ("copies", "views", "find_unused", "static_graph")
MEASURED = "brigade::benchmarks::measured_steps*"


def count(program: Path, mode: str, parameters: int, steps: int, layouts: int) -> float:
    """Per parameter and step."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    command += [f"--toggle-collect={MEASURED}", program, "--mode", mode]
    command += ["--parameters", str(parameters), "--steps", str(steps)]
    command += ["--layouts", str(layouts)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if collected is None:
        raise RuntimeError(f"callgrind printed no count:\n{done.stderr}")
    return int(collected[1]) / (parameters * steps * layouts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="training_steps as built by CMake")
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layouts", type=int, default=9, help="models, one after the other")
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    arguments = parser.parse_args()
    sizes = (arguments.parameters, arguments.steps, arguments.layouts)
    alone = count(arguments.program, "alone", *sizes)
    print(f"{arguments.parameters} parameters of 4 elements, instructions per parameter and step")
    print(f"{'training alone':18}{alone:10.0f}")
    for mode in arguments.modes:
        added = count(arguments.program, mode, *sizes) - alone
        print(f"{mode:18}{added:+10.0f}")


if __name__ == "__main__":
    main()
