"""Worker extensions that differ: one leaves a tensor as it was, one has another head."""

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from weight_sync.vllm_worker import WeightSyncWorker


class StaleWorker(WeightSyncWorker):
    """The real one, but for the parameter that `leave_stale` has named."""

    _left: str = ""

    def leave_stale(self, worker: int, parameter: str) -> None:
        """Have one worker, by rank, leave one parameter as it was at each load to come."""
        if self._weight_sync_receiver._worker == worker:
            self._left = parameter

    def weight_sync_apply(self) -> bytes:
        """Write what has come, and what was held before over that."""
        if not self._left:
            return super().weight_sync_apply()
        held = self.model_runner.get_model().get_parameter(self._left)
        before = held.clone()
        report = super().weight_sync_apply()
        held.copy_(before)
        return report


class OtherHeadWorker(WeightSyncWorker):
    """The real one, of a model whose head multiplies in bfloat16 whatever is asked."""

    def weight_sync_device(self) -> bytes:
        """Look at such a head."""
        for each in self.model_runner.get_model().modules():
            if isinstance(each, LogitsProcessor):
                each.head_dtype = torch.bfloat16
        return super().weight_sync_device()
