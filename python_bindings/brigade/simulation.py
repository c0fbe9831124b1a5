"""Predicts a training step on a cluster: `brigade simulate`.

    brigade simulate llama-70b --strategy fsdp2 --hosts 32 --checkpoint fit
    brigade simulate sweep.json --strategy ddp

Implemented in simulation/; simulation_json.h lists the keys of a request.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterable
from typing import Any

from brigade import _C

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "yafsdp", "brigade")


def simulate(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the simulated step of a request (simulation/simulation_json.h lists both's keys).

    Raises:
        ValueError: A key is unknown, missing, out of range or contradicts another one.
    """
    return json.loads(_C.simulate(json.dumps(request)))


def _curve(requests: Iterable[tuple[dict[str, int], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the simulated steps; leaves out requests that the strategy does not allow."""
    curve = []
    for point, request in requests:
        try:
            step = simulate(request)
        except ValueError:
            continue
        curve.append(point | {key: step[key] for key in ("step_s", "exposed_s", "tflops", "mfu")})
        curve[-1]["memory_bytes"] = step["memory"]["total"]
        curve[-1]["fits"] = step["memory"]["fits"]
        curve[-1]["between_hosts_bytes"] = step["between_hosts_bytes_per_rank"]
    return curve


def scaling_curve(request: dict[str, Any], most: int = 512) -> list[dict[str, Any]]:
    """Returns the steps of 1, 2, 4, ... `most` GPUs, as many per host as in the request.

    Leaves out numbers of GPUs that the strategy does not allow, such as a part of a shard group, or
    whose memory is too small.
    """
    cluster = request.get("cluster", {})
    per_host = cluster.get("gpus_per_host", 8)
    counts = {n << power for n in (1, per_host) for power in range(most.bit_length())}
    requests = []
    for gpus in sorted(n for n in counts if n <= most and (n <= per_host or n % per_host == 0)):
        size = {"hosts": max(1, gpus // per_host), "gpus_per_host": min(gpus, per_host)}
        requests.append(({"gpus": gpus}, request | {"cluster": cluster | size}))
    return [point for point in _curve(requests) if point["fits"]]


def sharding_curve(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the steps with 1, 2, 4, ... ranks per copy of the model (hybrid sharding)."""
    cluster = request.get("cluster", {})
    world = cluster.get("hosts", 1) * cluster.get("gpus_per_host", 8)
    sizes = [{"shard_ranks": 1 << power} for power in range(world.bit_length())]
    return _curve((n, request | {"strategy": request["strategy"] | n}) for n in sizes)


def recorded_model(file: str) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Returns the model, the ranks and the costs of collectives of a sweep's JSON file.

    A layer is a parameter; its backward is the time since the gradient before it.
    """
    try:
        data = json.loads(pathlib.Path(file).read_text())
        if data.get("kind") != "sweep":
            raise ValueError(f"kind {data.get('kind')!r}")
        (model,) = data["models"]
        gradients = model["ready"]
        begins = [0.0, *(gradient["ready_ms"] for gradient in gradients)]
        layers = [
            {
                "name": gradient["name"] or f"parameter {gradient['parameter']}",
                "tensors": [gradient["bytes"] // 4],
                "forward_s": 1e-3 * model["forward_ms"] / len(gradients),
                "backward_s": 1e-3 * (gradient["ready_ms"] - begin),
            }
            for gradient, begin in zip(gradients, begins, strict=False)
        ]
        costs = [[point["bytes"], point["seconds"]] for point in model["cost"]["points"]]
        recorded = {"name": model["name"], "layers": layers[::-1]}
        return recorded, model["ranks"], {"all_reduce": costs}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{file}: expected the JSON file of a sweep of one model, found: {error!r}.\n"
            "Write it with brigade bench --json, or name a built-in model."
        ) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="resnet50, bert-base, bert-large, gpt2, gpt2-xl, gpt3, llama-7b, llama-70b, "
        "llama-405b, or the JSON file of a sweep: its measured times and all-reduces; default: "
        "that of --request",
    )
    parser.add_argument(
        "--strategy", choices=STRATEGIES, help="default: brigade; of a recorded model: ddp"
    )
    groups = {
        "workload": {
            "batch": (int, "samples per rank and micro-batch (1)"),
            "sequence-length": (int, "tokens of a sample (the longest of the model's training)"),
            "micro-batches": (int, "per step; only the last one is reduced (1)"),
        },
        "cluster": {
            "hosts": (int, "number of hosts (1)"),
            "gpus-per-host": (int, "GPUs of a host (8)"),
            "device": (str, "a100, h100 or b200 (a100)"),
            "inside": (str, "link of a GPU in its host, such as nvlink4 (nvlink3)"),
            "between": (str, "link of a NIC between hosts, such as ndr or ethernet100 (hdr)"),
            "nics-per-host": (int, "NICs of a host (one per GPU)"),
            "hosts-per-rack": (int, "hosts below one switch (all)"),
            "oversubscription": (float, "bandwidth of a rack's NICs over its uplink's (1)"),
            "jitter": (float, "standard deviation of a rank's compute over its mean (0)"),
        },
        "strategy": {
            "shard-ranks": (int, "ranks that hold one copy of the model (all)"),
            "prefetch-depth": (int, "units gathered ahead (1)"),
            "buffers": (int, "of unsharded units (2)"),
            "checkpoint": (str, "none, all, or fit: as few layers as the memory needs (none)"),
            "plan": (str, "exact: planned buckets in place of the default caps"),
        },
    }
    for group, options in groups.items():
        for name, (kind, text) in options.items():
            parser.add_argument(f"--{name}", type=kind, help=text, dest=f"{group}.{name}")
    parser.add_argument(
        "--keep-unsharded",
        choices=("all", "fit"),
        help="units unsharded from forward to backward: all, or as many as fit (none)",
    )
    parser.add_argument("--request", metavar="FILE", help="JSON request for all further settings")
    parser.add_argument("--json", metavar="FILE", help="file for all figures")


def request_of(given: argparse.Namespace) -> dict[str, Any]:
    request: dict[str, Any] = {}
    if given.request:
        try:
            request = json.loads(pathlib.Path(given.request).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--request: expected a JSON file, found: {error}") from error
        if not isinstance(request, dict):
            raise ValueError("--request: expected a JSON object, found another value")
    cluster, strategy = request.setdefault("cluster", {}), request.setdefault("strategy", {})
    is_recorded = given.model is not None and given.model.endswith(".json")
    strategy.setdefault("kind", "ddp" if is_recorded else "brigade")
    if given.strategy:
        strategy["kind"] = given.strategy
    if given.model is not None:
        request["model"] = given.model
    if is_recorded:
        request["model"], ranks, costs = recorded_model(given.model)
        request["strategy"] = strategy = {"parameter_bytes": 4, "gradient_bytes": 4} | strategy
        if all(value is None for name, value in vars(given).items() if name.startswith("cluster")):
            cluster.setdefault("costs", costs)
            cluster.setdefault("gpus_per_host", ranks)
            cluster.setdefault("device", {})  # no memory limit, no time of the optimizer
    sections = {"workload": request, "cluster": cluster, "strategy": strategy}
    for name, value in vars(given).items():
        section, _, key = name.partition(".")
        if key and value is not None:
            sections[section][key.replace("-", "_")] = value
    if given.keep_unsharded:
        strategy["reshard_after_forward"] = False if given.keep_unsharded == "all" else "fit"
    return request


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def table(
    request: dict[str, Any], step: dict[str, Any], curves: dict[str, list[dict[str, Any]]]
) -> str:
    """Returns the step, the memory, and both curves as text."""
    memory = step["memory"]
    parts = ", ".join(
        f"{name} {_gib(memory[name])}"
        for name in ("parameters", "gradients", "optimizer", "unsharded", "activations")
    )
    name = request["model"] if isinstance(request["model"], str) else request["model"]["name"]
    ms = {key: f"{1e3 * value:.4g}" for key, value in step.items() if key.endswith("_s")}
    fits = f"fits into {_gib(memory['capacity'])}" if memory["capacity"] else "no limit is known"
    if not memory["fits"]:
        fits = f"does NOT fit into {_gib(memory['capacity'])}: use --checkpoint fit or more ranks"
    lines = [
        f"{name}, {request['strategy']['kind']}: step {ms['step_s']} ms "
        f"(forward {ms['forward_s']}, backward {ms['backward_s']}, recomputed "
        f"{ms['recompute_s']}, optimizer {ms['optimizer_s']}, exposed communication "
        f"{ms['exposed_s']} of {ms['communication_s']})",
        f"{step['tflops']:.4g} TFLOPS per GPU, MFU {step['mfu']:.1%}; sent per rank "
        f"{_gib(step['sent_bytes_per_rank'])}, between hosts "
        f"{_gib(step['between_hosts_bytes_per_rank'])}",
        f"memory {_gib(memory['total'])} per rank, {fits}",
        f"  {parts}",
        f"checkpointed layers: {len(step['checkpointed_layers'])}; units kept unsharded: "
        f"{len(step['kept_units'])}",
    ]
    if curves["curve"]:
        lines.append("   GPUs   step ms    exposed  TFLOPS    MFU")
        lines += [
            f"{row['gpus']:7} {1e3 * row['step_s']:9.4g}  {1e3 * row['exposed_s']:9.4g} "
            f"{row['tflops']:7.4g} {row['mfu']:6.1%}"
            for row in curves["curve"]
        ]
    if len(curves["shard_ranks_curve"]) > 1:
        lines.append("ranks per copy   step ms    exposed    memory    between hosts, per rank")
        lines += [
            f"{row['shard_ranks']:14} {1e3 * row['step_s']:9.4g}  {1e3 * row['exposed_s']:9.4g} "
            f"{_gib(row['memory_bytes']):>9}    {_gib(row['between_hosts_bytes'])}"
            f"{'' if row['fits'] else ', does not fit'}"
            for row in curves["shard_ranks_curve"]
        ]
    return "\n".join(lines) + "\n"


def run(given: argparse.Namespace) -> None:
    """Runs `brigade simulate`."""
    request = request_of(given)
    step = simulate(request)
    curves: dict[str, list[dict[str, Any]]] = {"curve": [], "shard_ranks_curve": []}
    if "costs" not in request["cluster"]:  # those hold for one number of ranks
        curves["curve"] = scaling_curve(request)
        curves["shard_ranks_curve"] = sharding_curve(request)
    print(table(request, step, curves), end="")
    if given.json:
        data = {"kind": "simulation", "set_up": {}, "request": request, "result": step, **curves}
        pathlib.Path(given.json).write_text(json.dumps(data, indent=1) + "\n")
