"""Backwards whose end the caller chooses: DistributedDataParallel's part of it."""

from __future__ import annotations

from typing import Any


class ManualFinalization:
    """To be mixed into the wrapper, which has the reducer."""

    mixed_precision: object
    reducer: Any
    _delay_all_reduce_all_params: bool
    _require_manual_backward_finalization: bool
    _use_python_reducer: bool

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether finalize_backward() has to be called, once for each reduced backward.

        If False, which it is at first, backward itself waits for the gradients of the other
        ranks. To be set before forward, on all ranks alike.

        Raises:
            RuntimeError: There is no reducer to wait for, or a backward is under way.
        """
        return self._require_manual_backward_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self._require_a_reducer()
        elif self._delay_all_reduce_all_params:
            return
        self.reducer._set_manual_finalization_required(required)
        self._require_manual_backward_finalization = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether finalize_backward() has to wait for the end of the backward to come.

        To be asked after forward. If False, a hook that runs in backward may call it as soon
        as all gradients are there.
        """
        if not self._require_manual_backward_finalization:
            return False
        return self.mixed_precision is not None or self.reducer._should_finalize_after_backward()

    def finalize_backward(self) -> None:
        """Waits for the gradients of the other ranks and puts the averages into ``.grad``.

        Raises:
            RuntimeError: It is not required, gradients are still to come, or there is nothing
                to wait for: under no_sync(), or when it is called twice.
        """
        self._require_a_reducer()
        self.reducer._finalize_backward_manual()

    def _require_a_reducer(self) -> None:
        if self._delay_all_reduce_all_params:
            raise RuntimeError(
                "DistributedDataParallel: Manual backward finalization is not supported when all "
                "parameters are in delay_all_reduce_named_params, whose hook waits for them.\n"
                "Leave a parameter out of that list, or let backward finish by itself."
            )
        if self._use_python_reducer:
            raise RuntimeError(
                "DistributedDataParallel: Manual backward finalization is not supported with the "
                'compiler\'s optimize_ddp="python_reducer", where the compiled backward waits.\n'
                "Choose another mode before the module is wrapped."
            )
