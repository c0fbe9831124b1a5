"""Logger of DistributedDataParallel: torch's _get_ddp_logging_data() for brigade's reducer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from brigade._C import Reducer


class Logger(dist.Logger):
    """torch's logger with the values of brigade's reducer. Keys are torch's; times are in ns.

    `parameters` are the reducer's; `options` are keyword arguments of torch's Reducer.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        **options: Any,
    ) -> None:
        # torch's logger needs a reducer of torch's; this one is never used.
        dtypes = {parameter.dtype for parameter in parameters}
        idle = [torch.zeros(1, dtype=dtype, device="cpu", requires_grad=True) for dtype in dtypes]
        buckets = [[i] for i in range(len(idle))]
        super().__init__(dist.Reducer(idle, buckets, [1] * len(idle), group, **options))
        self._reducer = reducer
        self._bytes = [parameter.nbytes for parameter in parameters]
        self._num_samples = 0
        self._error_time_ns = 0  # steady clock
        self._data: dict[str, int | str] = {
            "iteration": 0,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(self._bytes),
            "is_multi_device_module": int(len({p.device for p in parameters}) > 1),
            "bucket_sizes": self._bucket_sizes(),
        }

    def _bucket_sizes(self) -> str:
        sizes = [sum(self._bytes[i] for i in bucket) for bucket in self._reducer._bucket_plan()]
        return ", ".join(map(str, sizes))

    def set_runtime_stats_and_log(self) -> None:
        """Records the previous iteration if it was sampled; called when a forward begins."""
        if (times := self._reducer._timeline()) is None:
            return
        statistics, data = self._reducer._statistics(), self._data
        data["iteration"] = statistics["iteration"]
        data["can_set_static_graph"] = int(self._reducer._ddp_graph_static())
        iteration, durations, instants, order = times
        if iteration != statistics["iteration"]:
            return
        self._num_samples += 1
        for name, time_ns in durations.items():
            average = int(data.get(f"avg_{name}", 0))
            data[f"avg_{name}"] = average + (time_ns - average) // self._num_samples
        data.update(durations)
        data.update(instants)
        data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, order))
        data["unused_parameter_size"] = sum(self._bytes) - sum(self._bytes[i] for i in set(order))

    def set_error_and_log(self, error: str) -> None:
        """Records the text of an error."""
        self._set_error(error, self._reducer._statistics()["iteration"], time.monotonic_ns())

    def _set_error(self, text: str, iteration: int, time_ns: int) -> None:
        self._error_time_ns = time_ns
        self._data.update(has_error=1, error=text, iteration=iteration)

    def _set_static_graph(self) -> None:
        self._data["static_graph"] = 1

    def _get_ddp_logging_data(self) -> dist.DDPLoggingData:
        statistics = self._reducer._statistics()
        error = self._reducer._last_error()
        if error is not None and error[0] > self._error_time_ns:
            time_ns, iteration, text = error
            self._set_error(text, iteration, time_ns)
        self._data["num_buckets_reduced"] = statistics["buckets_reduced"]
        self._data["has_rebuilt_buckets"] = int(statistics["rebuilds"] > 0)
        if statistics["rebuilds"] > 0:
            self._data["rebuilt_bucket_sizes"] = self._bucket_sizes()
            self._data["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, bucket)) for bucket in self._reducer._bucket_plan()
            )
        data = super()._get_ddp_logging_data()
        texts, numbers = dict(data.strs_map), dict(data.ints_map)
        for name, value in self._data.items():
            (texts if isinstance(value, str) else numbers)[name] = value
        data.strs_map, data.ints_map = texts, numbers
        return data
