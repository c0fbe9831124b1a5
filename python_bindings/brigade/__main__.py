"""The command line: `brigade`, or `python -m brigade`."""

from __future__ import annotations

import argparse
import os

_TORCHRUN = "torchrun --standalone --nproc-per-node 2 -m brigade bench"


def main() -> None:
    parser = argparse.ArgumentParser(prog="brigade", description="Measures and predicts training.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser(
        "bench",
        prog=_TORCHRUN,
        help="measure a model's steps with several bucket caps, or collectives, under torchrun",
        description="Measures a model's step time with several bucket caps, or collectives.",
    )
    from brigade import bench as bench_module

    bench_module.add_arguments(bench)
    given = parser.parse_args()
    if given.command == "bench":
        if "RANK" not in os.environ:
            bench.error("the environment variable RANK is not set: start with torchrun, as above")
        if given.factory == "collectives":
            from brigade import collectives

            collectives.run(given)
        else:
            bench_module.run(given)


if __name__ == "__main__":
    main()
