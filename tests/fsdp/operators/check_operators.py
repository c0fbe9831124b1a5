"""Compares torch's operator samples on sharded and on plain tensors.

An operator that sharded tensors accept (fsdp/shard_operators.cc) must give, on
two ranks, the shards of the plain result; a reduction must give the plain
result. Any other difference is a trap: an operator with a misleading tag.
Differences by rounding are only listed, since some kernels compute the last
elements of a tensor with other instructions. A refusal is never a trap.

    python tests/fsdp/operators/check_operators.py [--all] FOLDER

FOLDER has the module `sharded_operators`, a target of CMake. Prints the traps;
exits with 1 if there are any.
"""

import argparse
import collections
import importlib
import sys
import threading
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
)
from torch.utils._pytree import tree_flatten, tree_map_only

RANKS = 2
# Random fills: the ranks run one after the other, each from the same seed.
DRAWS = {"bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform"}
DRAWS |= {"rand_like", "randint_like", "randn_like"}
DRAWS |= {"nn.functional.alpha_dropout", "nn.functional.dropout"}
UNDEFINED = {"empty_like", "new_empty", "new_empty_strided"}  # undefined elements


def flat(tensor):
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def is_dense(tensor):
    return (
        tensor.layout is torch.strided
        and torch.ops.aten.is_non_overlapping_and_dense(tensor)
        and tensor.storage_offset() == 0
    )


def per_rank(whole):
    return -(-whole.numel() // RANKS)


def piece(whole, rank):
    size = per_rank(whole)
    begin = min(whole.numel(), size * rank)
    end = min(whole.numel(), begin + size)
    return flat(whole)[begin:end], begin


def same(a, b, exact):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype is torch.complex32:  # few operators support it
            a, b = a.to(torch.complex64), b.to(torch.complex64)
        if exact:
            return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(
                a.isnan(), b.isnan()
            )
        return torch.allclose(a, b, equal_nan=True, rtol=1e-4, atol=1e-5)
    return a == b


class Check:
    def __init__(self, extension):
        self.extension = extension
        self.traps = collections.defaultdict(set)
        self.rounding = set()
        self.admitted = collections.Counter()
        self.refused = collections.Counter()

    def on_ranks(self, call, inputs, together):
        """Returns each rank's result, or the exception if it was refused."""
        ranks = self.extension.Ranks(RANKS if together else 1)
        results = [None] * RANKS

        def run(rank):
            group = self.extension.RankGroup(ranks, rank)

            def shard(tensor):
                if tensor.dim() == 0:
                    return tensor.clone()
                local, offset = piece(tensor, rank)
                return self.extension.make_sharded(
                    local.clone(),
                    offset,
                    per_rank(tensor),
                    group,
                    list(tensor.shape),
                    list(tensor.stride()),
                )

            args, kwargs = tree_map_only(torch.Tensor, shard, inputs)
            try:
                with torch.no_grad():
                    results[rank] = (call(*args, **kwargs), (args, kwargs))
            except (NotImplementedError, RuntimeError, ValueError, TypeError, IndexError) as error:
                results[rank] = error
            if together:
                ranks.leave()

        if not together:
            for rank in range(RANKS):
                torch.manual_seed(0)
                run(rank)
            return results
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def compare(self, name, call, inputs):
        tensors = [t for t in tree_flatten(inputs)[0] if isinstance(t, torch.Tensor)]
        if not any(t.dim() > 0 for t in tensors) or not all(is_dense(t) for t in tensors):
            return
        # Each argument gets its own memory, as on separate ranks.
        inputs = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), inputs)
        wholes = tree_map_only(torch.Tensor, lambda t: t.clone(), inputs)
        base = name.split()[0]
        try:
            torch.manual_seed(0)
            with torch.no_grad():
                expected = (call(*wholes[0], **wholes[1]), wholes)
        except Exception:
            return
        results = self.on_ranks(call, inputs, together=base not in DRAWS)
        if any(isinstance(result, Exception) for result in results):
            self.refused[name] += 1
            return
        self.admitted[name] += 1
        leaves, _ = tree_flatten(expected)
        by_rank = [tree_flatten(result)[0] for result in results]
        for index, leaf in enumerate(leaves):
            for rank in range(RANKS):
                try:
                    found = by_rank[rank][index]
                    local = (
                        self.extension.local(found) if isinstance(found, torch.Tensor) else None
                    )
                    if local is not None:
                        if leaf.shape != found.shape or leaf.stride() != found.stride():
                            self.traps[name].add("sizes or strides")
                        elif base in UNDEFINED:
                            continue
                        elif not same(local, piece(leaf, rank)[0], exact=False):
                            self.traps[name].add("elements")
                        elif not same(local, piece(leaf, rank)[0], exact=True):
                            self.rounding.add(name)
                    elif not same(found, leaf, exact=False):
                        self.traps[name].add("value")
                except Exception as error:  # not comparable
                    self.traps[name].add(type(error).__name__ + str(error)[:60])


def check_info(check, info, dtypes, limit):
    calls = {"": info.op, "method": getattr(info, "method_variant", None)}
    calls["in place"] = getattr(info, "inplace_variant", None)
    for dtype in dtypes:
        if dtype not in info.supported_dtypes("cpu"):
            continue
        try:
            samples = list(info.sample_inputs("cpu", dtype))[:limit]
        except Exception:
            continue
        for index, sample in enumerate(samples):
            names = [f"{info.name} {kind}".strip() for kind in calls]
            if index == 4 and not any(name in check.admitted for name in names):
                break
            inputs = ((sample.input, *sample.args), sample.kwargs)
            for kind, call in calls.items():
                if call is not None:
                    check.compare(f"{info.name} {kind}".strip(), call, inputs)


def check_foreach(check, info, dtypes, limit):
    for dtype in dtypes:
        try:
            samples = list(
                info.sample_inputs(
                    "cpu", dtype, noncontiguous=False, allow_higher_dtype_scalars=True
                )
            )
        except Exception:
            continue
        for sample in samples[:limit]:
            inputs = ((list(sample.input), *sample.args), sample.kwargs)
            for call in (info.method_variant, info.inplace_variant):
                if call is not None:
                    check.compare(info.name, call, inputs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true", help="all samples, more dtypes")
    parser.add_argument("folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.path.insert(0, options.folder)
    check = Check(importlib.import_module("sharded_operators"))
    dtypes = [torch.float32, torch.int64, torch.bool]
    if options.all:
        dtypes += [torch.bfloat16, torch.float64, torch.uint8]
    limit = None if options.all else 12
    for info in op_db:
        check_info(check, info, dtypes, limit)
    for database in (
        foreach_unary_op_db,
        foreach_binary_op_db,
        foreach_pointwise_op_db,
        foreach_reduce_op_db,
        foreach_other_op_db,
    ):
        for info in database:
            check_foreach(check, info, dtypes[:1], limit)

    print(f"{len(check.admitted)} operators accepted, {len(check.refused)} refused")
    print("differ by rounding:", " ".join(sorted(check.rounding)))
    for name, why in sorted(check.traps.items()):
        print("trap:", name, sorted(why))
    return 1 if check.traps else 0


if __name__ == "__main__":
    sys.exit(main())
