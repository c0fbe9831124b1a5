"""Checks that the README's first program is examples/minimal, and that it learns.

Usage: check_example.py README minimal.cc minimal-binary
"""

import os
import re
import socket
import subprocess
import sys


def first_program(readme_path):
    with open(readme_path, encoding="utf-8") as readme:
        return re.search(r"```cpp\n(.*?)```", readme.read(), re.DOTALL).group(1)


def run_ranks(binary, world_size):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        environment = dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
        )
        ranks.append(
            subprocess.Popen([binary], env=environment, stdout=subprocess.PIPE, text=True)
        )
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs
    return outputs


def weights_of(output):
    # " 1.0001  0.9999 ...\n[ CPUFloatType{1,8} ]"; whole numbers print without a point.
    numbers = output.split("weights", 1)[1].split("[")[0].split()
    return [float(number) for number in numbers]


def main():
    readme, source, binary = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        assert file.read() == first_program(readme), "README and examples/minimal differ"
    first, second = (weights_of(output) for output in run_ranks(binary, 2))
    assert len(first) == 8, first
    assert first == second, "ranks ended with different weights"
    assert all(abs(weight - 1) < 0.01 for weight in first), first


if __name__ == "__main__":
    main()
