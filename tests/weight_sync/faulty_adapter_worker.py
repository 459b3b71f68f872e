"""A worker extension whose adapter goes wrong in ways that are easily taken for staleness."""

from concurrent.futures import wait
from typing import Any

import torch

from weight_sync.adapter import names_of, scaled
from weight_sync.vllm_worker import WeightSyncWorker

QUERIES = "model.layers.1.self_attn.q_proj"


class FaultyAdapterWorker(WeightSyncWorker):
    """The real one, but for the fault that `plant` has named."""

    _fault: str = ""
    _kept: torch.Tensor | None = None  # of the base, before it was written to

    def plant(self, fault: str) -> None:
        """Have each load to come go wrong so; '': none, and the base as it was."""
        self._fault = fault
        if self._kept is not None:
            self._queries().base_layer.weight.copy_(self._kept)
            self._kept = None

    def weight_sync_apply(self) -> bytes:
        """Write what has come; then have it as if not all of it had been, or otherwise."""
        before = [buffer.clone() for buffer in self._buffers()]
        report = super().weight_sync_apply()
        wait([self._weight_sync_receiver._summing])  # it must not see the half of this
        self._spoil(before)
        receiver = self._weight_sync_receiver
        receiver._summing = receiver._thread.submit(
            receiver._checksum, receiver._reception.tensors()
        )
        return report

    def _spoil(self, before: list[torch.Tensor]) -> None:
        layer, fault = self._queries(), self._fault
        if fault in ("stale", "delivered to the base"):
            for buffer, old in zip(self._buffers(), before, strict=True):
                buffer.copy_(old)
        if fault == "not delivered":
            for buffer in self._buffers():
                buffer.zero_()
        if fault in ("delivered to the base", "delivered to the base too"):
            arrived = dict(self._weight_sync_receiver._reception.tensors())
            a, b = (arrived[name] for name in names_of(QUERIES))
            if self._kept is None:
                self._kept = layer.base_layer.weight.clone()
            layer.base_layer.weight[: len(b)] += scaled(b, self._weight_sync_slot.adapter) @ a
        if fault == "one layer missing":
            layer.lora_a_stacked[0].zero_()
            layer.lora_b_stacked[0].zero_()
        if fault == "another alpha":
            for each in self._layers():
                for buffer in each.lora_b_stacked:
                    buffer.mul_(2.0)

    def _layers(self) -> list[Any]:
        return list(self.model_runner.lora_manager._adapter_manager.modules.values())

    def _buffers(self) -> list[torch.Tensor]:
        return [b for each in self._layers() for b in (*each.lora_a_stacked, *each.lora_b_stacked)]

    def _queries(self) -> Any:
        path = QUERIES.replace("q_proj", "qkv_proj")
        return self.model_runner.lora_manager._adapter_manager.modules[path]
