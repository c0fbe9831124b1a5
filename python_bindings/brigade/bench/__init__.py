"""Which bucket size suits a model: training steps timed under several of them.

    torchrun --standalone --nproc-per-node 2 -m brigade.bench my_training:workload

where ``workload`` is a function of the module ``my_training`` that gives a module
and one step of its training::

    def workload():
        torch.manual_seed(0)
        model = Net()
        inputs, targets = batch_of(dist.get_rank())
        return model, lambda model: F.cross_entropy(model(inputs), targets)

From Python: ``print(sweep(make_workload(workload)).table)``.
"""

from brigade.bench._sweep import DEFAULT_SIZES, Figures, sweep
from brigade.bench._workload import Workload, find_factory, make_workload

__all__ = ["DEFAULT_SIZES", "Figures", "Workload", "find_factory", "make_workload", "sweep"]
