"""Worker extension of vLLM: writes received versions, or a snapshot file, into the model in place.

It waits as `receiver` does. vLLM gets it as `worker_extension_cls=protocol.WORKER_EXTENSION`, so
that `collective_rpc` finds these methods, and this module is imported before the model is loaded.
(vLLM's own weight transfer carries no digest, has no deadline and cannot lose a receiver.)

That import matters on a CPU. There vLLM packs every linear weight for oneDNN and throws the plain
one away, a tied LM head keeps a packed copy of its own that no reload refreshes, and a layerwise
reload takes 15-50 ms (1.5 s the first time). Left unpacked, weights are plain parameters as on a
GPU: `load_weights` copies into them in 2 ms (demo-size model; tokens/s unchanged), and a tied head
reads what the embedding reads. No environment variable is needed.
"""

import logging
import time
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.lora.punica_wrapper import punica_cpu
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from weight_sync import buckets
from weight_sync.adapter_slot import AdapterSlot
from weight_sync.protocol import (
    ADAPTER_ID,
    ADAPTER_NAME,
    EngineDiffers,
    ManifestMismatch,
    VerificationFailed,
    WeightSyncError,
    WorkerReport,
    decode_adapter,
    encode,
)
from weight_sync.receiver import Receiver, failure

log = logging.getLogger(__name__)

# vLLM's own switch, per layer, for "do not pack on a CPU"; read when the model has been loaded.
LinearBase._cpu_skip_gemm_dispatch = True

# A process must ask Linux for AMX's tiles before it uses them. vLLM's attention leaves that to
# oneDNN, which may be kept from them (configs/runtime/amx.py): in bf16 the first batch would end
# the engine.
if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
    torch.cpu._is_amx_tile_supported = lambda: False


def _expanded(
    values: torch.Tensor,
    ends: torch.Tensor,
    total: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Each request's value for each of its drafted tokens; `ends`: the sums of their numbers."""
    kept = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return kept.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=total)


def _shrunk(inputs: Any, weights: Any, output: Any, *batch: Any) -> None:
    """Write what A makes of a batch's activations; `batch`: runs of tokens of one adapter each, as
    vLLM has them, and a factor.
    """
    _, _, which, runs, _, _, factor = batch
    if runs != 1:
        _shrunk_each(inputs, weights, output, *batch)
        return
    a = weights[int(which[0]), 0]
    torch.mm(inputs.to(output.dtype), a.to(output.dtype).T, out=output)
    output.mul_(factor)


def _expanded_by(inputs: Any, weights: Any, output: Any, *batch: Any) -> None:
    """Add what B makes of that to a slice of the layer's output."""
    _, _, which, runs, _, _, begin, size, adds = batch
    if runs != 1 or not adds:
        _expanded_by_each(inputs, weights, output, *batch)
        return
    b = weights[int(which[0]), 0].to(output.dtype)
    output[:, begin : begin + size].addmm_(inputs.to(output.dtype), b.T)


_shrunk_each, _expanded_by_each = punica_cpu.sgmv_shrink, punica_cpu.sgmv_expand_slice
if current_platform.is_cpu():
    # vLLM 0.32 writes these into a copy, and divides drafts' logits by what memory held,
    rejection_sampler.expand_batch_to_tokens = _expanded
    # and copies all of an adapter for each token; where one serves all of them, two products do.
    punica_cpu.sgmv_shrink, punica_cpu.sgmv_expand_slice = _shrunk, _expanded_by


class WeightSyncWorker:
    """Mixed into vLLM's worker; every method returns one encoded WorkerReport."""

    model_runner: Any
    model_config: Any
    parallel_config: Any
    _weight_sync_receiver: Receiver
    _weight_sync_slot: AdapterSlot | None = None

    def weight_sync_adapt(self, adapter: bytes) -> bytes:
        """Have the engine, started for it, compute an encoded Adapter, of zeros until a version of
        it is written. Before anything else is asked of it.
        """
        manager, decoded = self.model_runner.lora_manager, decode_adapter(adapter)
        if self._weight_sync_slot is not None:
            return encode(WorkerReport())
        named = LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_NAME)
        model = self.model_runner.get_model()
        try:
            if not model.lora_manager.modules:
                raise EngineDiffers(f"vLLM adapts no layer of its {type(model).__name__}")
            manager.add_dummy_lora(named, rank=1)
            model.lora_manager.activate_adapter(ADAPTER_ID)
            slot = AdapterSlot(model, model.lora_manager, decoded, _output_sizes)
        except WeightSyncError as error:
            return failure(error)
        self._weight_sync_slot = slot
        self._watch(slot)
        return encode(WorkerReport())

    def _watch(self, slot: AdapterSlot) -> None:
        """Have the slot see which adapters the requests of each batch name."""
        runner = self.model_runner
        activate = runner._set_active_loras

        def noted(prompts: Any, *others: Any, **named: Any) -> None:
            slot.note(prompts)
            activate(prompts, *others, **named)

        runner._set_active_loras = noted

    def weight_sync_device(self) -> bytes:
        """The model's device. The first call of all, by whoever starts an engine: it sees that the
        model is the one asked for, and makes the receiver.
        """
        ranks, workers = get_tensor_model_parallel_world_size(), self.parallel_config.world_size
        if workers != ranks:
            cause = f"the engine has {workers!r} workers, {ranks!r} of them by tensor parallelism"
            return failure(EngineDiffers(f"{cause}: leave its other kinds of parallelism at 1"))
        model = self.model_runner.get_model()
        if problem := _head_problem(model, self.model_config.hf_config):
            return failure(EngineDiffers(problem))
        if not hasattr(self, "_weight_sync_receiver"):
            slot = self._weight_sync_slot
            self._weight_sync_receiver = Receiver(
                slot.layout if slot else partial(checkpoint_layout, model),
                slot.load if slot else partial(_load, model),
                slot.checksum if slot else lambda _: checksum(model),
                next(model.parameters()).device,
                get_tensor_model_parallel_rank(),
                ranks,
                slot.adapter if slot else None,
            )
        return self._weight_sync_receiver.device()

    def weight_sync_connect(self, rendezvous: bytes) -> bytes:
        """Begin to join the group of an encoded Rendezvous."""
        return self._weight_sync_receiver.connect(rendezvous)

    def weight_sync_receive(self, manifest: bytes, deadline_s: float) -> bytes:
        """Check an encoded WeightManifest against the model; receive its bytes on a thread."""
        return self._weight_sync_receiver.receive(manifest, deadline_s)

    def weight_sync_arrived(self) -> bytes:
        """Report whether the bytes are there, with the digest announced."""
        return self._weight_sync_receiver.arrived()

    def weight_sync_apply(self) -> bytes:
        """Write them into the model; call while paused."""
        return self._weight_sync_receiver.apply()

    def weight_sync_checksum(self) -> bytes:
        """The checksum of the model as it was loaded last, once it has been made."""
        try:
            if self._weight_sync_slot is not None:
                self._weight_sync_slot.require_named()
        except WeightSyncError as error:
            return failure(error)
        return self._weight_sync_receiver.checksum()

    def weight_sync_release(self) -> bytes:
        """Remove what was handed on to the other actors of this node."""
        return self._weight_sync_receiver.release()

    def load_snapshot(self, path: str, version: int) -> bytes:
        """Write a safetensors file's tensors into the model, or into its adapter; called while
        paused.

        Reports ManifestMismatch when they are not the model's, VerificationFailed on a partial
        load. (vLLM takes one worker's exception for the answer of all, and the other workers'
        answers for those to its next call.)
        """
        begun = time.perf_counter()
        tensors = load_file(path)
        offered = {n: (tuple(t.shape), buckets.dtype_name(t.dtype)) for n, t in tensors.items()}
        model, slot = self.model_runner.get_model(), self._weight_sync_slot
        try:
            own = slot.layout() if slot else checkpoint_layout(model)
            buckets.require_same(offered, own, (path, "actor"))
            if slot:
                slot.load(tensors.items())
                slot.checksum(tensors.items())
            else:
                _load(model, tensors.items())
        except WeightSyncError as error:
            return failure(error)
        seconds = time.perf_counter() - begun
        log.info("version %d loaded from %s in %.3f s", version, path, seconds)
        return encode(WorkerReport(apply_s=seconds))


def _head_problem(model: torch.nn.Module, hf_config: Any) -> str:
    """Say that a head that is to multiply in another dtype does not; '' where all is well."""
    asked = getattr(hf_config, "head_dtype", None) or "model"
    if asked == "model":
        return ""
    heads = [each for each in model.modules() if isinstance(each, LogitsProcessor)]
    if heads and all(str(each.head_dtype) == f"torch.{asked}" for each in heads):
        return ""
    found = sorted({buckets.dtype_name(each.head_dtype) for each in heads}) or "no head of its own"
    return (
        f"model.head_dtype = {asked!r}: vLLM's {type(model).__name__} has {found} on this device: "
        "set it to ''"
    )


def checksum(model: torch.nn.Module) -> str:
    """Digest of the model's parameters by name, as they lie (12 times as fast as vLLM's own)."""
    named = sorted(model.named_parameters())
    return buckets.digest(p.detach().contiguous().view(-1).view(torch.uint8) for _, p in named)


def checkpoint_layout(model: torch.nn.Module) -> buckets.Layout:
    """Names, shapes and dtypes of the checkpoint tensors that fill a vLLM model; tied weights once.

    Undoes vLLM's fusing (`qkv_proj`, `gate_up_proj`), its sharing out among workers and its padding
    of the vocabulary.
    Raises ManifestMismatch on a quantised model.
    """
    layout: buckets.Layout = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, LinearBase) and not isinstance(method, UnquantizedLinearMethod):
            raise ManifestMismatch(f"{path} is quantised by {type(method).__name__}: not supported")
        for name, parameter in module.named_parameters(path, recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            dtype = buckets.dtype_name(parameter.dtype)
            parts = _parts(model, module, name, tuple(parameter.shape))
            layout |= {part: (shape, dtype) for part, shape in parts}
    return layout


def _parts(
    model: torch.nn.Module, module: torch.nn.Module, name: str, shape: tuple[int, ...]
) -> list[tuple[str, tuple[int, ...]]]:
    """The checkpoint tensors, whole, that a worker's parameter is made of, or is a shard of."""
    rows, *others = shape
    if isinstance(module, VocabParallelEmbedding):
        return [(name, (module.org_vocab_size, *others))]
    path, _, kind = name.rpartition(".")
    if isinstance(module, RowParallelLinear) and kind == "weight":
        return [(name, (rows, module.input_size))]
    parent, _, leaf = path.rpartition(".")
    fused = getattr(model, "packed_modules_mapping", {}).get(leaf, ())
    sizes = _output_sizes(module) or [rows]
    if len(fused) < 2:
        return [(name, (sum(sizes), *others))]
    return [
        (f"{parent}.{part}.{kind}", (size, *others))
        for part, size in zip(fused, sizes, strict=True)
    ]


def _output_sizes(module: torch.nn.Module) -> list[int]:
    """A layer's rows over all workers, part by part; none where each worker has all of them.

    Of keys and values, which workers beyond the number of heads hold alike, each once.
    """
    if isinstance(module, QKVParallelLinear):
        queries = module.total_num_heads * module.head_size
        sizes = (module.head_size, module.v_head_size)
        return [queries, *(module.total_num_kv_heads * size for size in sizes)]
    if isinstance(module, LinearBase) and hasattr(module, "output_sizes"):
        return list(module.output_sizes)
    return [module.output_size] if isinstance(module, ColumnParallelLinear) else []


def _load(model: torch.nn.Module, named_tensors: buckets.NamedTensors) -> None:
    """Copy into the model's parameters. Raises VerificationFailed when some were not written."""
    _read_live_weights(model)
    loaded = model.load_weights(named_tensors)
    left = sorted(name for name, _ in model.named_parameters() if name not in loaded)
    if left:
        raise VerificationFailed(f"{len(left)} parameters were not loaded: {left[:3]!r}")


def _read_live_weights(model: torch.nn.Module) -> None:
    """Have (tied) LM heads multiply by their parameter, not by a copy packed at load time."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.cpu_linear = torch.nn.functional.linear
