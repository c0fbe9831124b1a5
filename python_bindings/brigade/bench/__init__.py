"""Which bucket size suits a model: training steps timed under several of them.

    torchrun --standalone --nproc-per-node 2 -m brigade.bench my_training:workload

where ``workload`` is a function of the module ``my_training`` that gives a module
and one step of its training::

    def workload():
        torch.manual_seed(0)
        model = Net()
        inputs, targets = batch_of(dist.get_rank())
        return model, lambda model: F.cross_entropy(model(inputs), targets)

From Python: ``report(sweep(workload()))``. Measuring (``_measure``), statistics
(``_statistics``) and what is shown (``_report``) know nothing of each other's ways.
"""

from brigade.bench._measure import Samples, Track, sweep
from brigade.bench._report import report, to_json
from brigade.bench._statistics import ArmSummary, Quartiles, Recommendation, Summary, summarize
from brigade.bench._workload import Arm, Workload, caps, find_factory, make_workload

__all__ = [
    "Arm",
    "ArmSummary",
    "Quartiles",
    "Recommendation",
    "Samples",
    "Summary",
    "Track",
    "Workload",
    "caps",
    "find_factory",
    "make_workload",
    "report",
    "summarize",
    "sweep",
    "to_json",
]
