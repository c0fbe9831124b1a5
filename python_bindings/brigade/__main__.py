"""The command line: `brigade`, or `python -m brigade`."""

from __future__ import annotations

import argparse

from brigade import bench, collectives, report, sharded_bench, simulation

_TORCHRUN = "torchrun --standalone --nproc-per-node 2 -m brigade bench"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="brigade", description="Measures training, predicts it, and writes a report."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser(
        "bench",
        prog=_TORCHRUN,
        help="measure a model's steps with several bucket caps, or collectives, under torchrun",
        description="Measures a model's step time with several bucket caps, or collectives.",
    )
    bench.add_arguments(measure)
    simulate = commands.add_parser(
        "simulate",
        help="predict a step of a model on a cluster",
        description="Predicts time, traffic and memory of a training step on a cluster.",
    )
    simulation.add_arguments(simulate)
    write = commands.add_parser(
        "report",
        help="write figures as one HTML page",
        description="Writes JSON files of bench and simulate as one HTML page. Two sweeps of one "
        "model are compared.",
    )
    write.add_argument("files", nargs="+", metavar="FILE", help="JSON file")
    write.add_argument("-o", "--output", metavar="PAGE", required=True, help="HTML file to write")
    given = parser.parse_args()
    if given.command == "bench":
        bench.check_arguments(measure, given)
    try:
        if given.command == "simulate":
            simulation.run(given)
        elif given.command == "report":
            report.write_report(given.files, given.output)
        elif given.factory == "collectives":
            collectives.run(given)
        elif given.units:
            sharded_bench.run(given)
        else:
            bench.run(given)
    except (ValueError, ImportError, OSError) as error:
        if given.command == "bench":
            raise  # torchrun names the rank
        text = str(error).removeprefix("brigade report: ")
        parser.exit(2, f"brigade {given.command}: {text}\n")


if __name__ == "__main__":
    main()
