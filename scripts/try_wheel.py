"""Training with an installed wheel, run by scripts/wheel.sh under torchrun.

usage: try_wheel.py FOLDER, which brigade must be installed in
"""

import pathlib
import sys

import torch
import torch.distributed as dist

import brigade

installed = pathlib.Path(brigade.__file__)
assert installed.is_relative_to(sys.argv[1]), f"imported brigade from {installed}"
assert (installed.parent / "py.typed").exists()
assert (installed.parent / "report.html").exists()
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(3, 1)
with brigade.install():
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
assert isinstance(wrapped, brigade.DistributedDataParallel)
for _ in range(3):
    wrapped.zero_grad()
    wrapped(torch.full((1, 3), float(rank))).sum().backward()
    average = sum(range(world_size)) / world_size
    assert model.weight.grad.tolist() == [[average] * 3], model.weight.grad
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print(f"brigade {brigade.__version__} trains with torch {torch.__version__}")
