"""DeepSpeed behind one small class: nothing else in the project knows how a step is made.

ZeRO 0 to 3 on any number of ranks; every method but `close` is collective. Gradients of shares are
summed over micro-batches and ranks. One rank by itself needs no rendezvous (gloo listens on
loopback while the engine lives); several join their group first.
"""

import contextlib
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from transformers import PreTrainedModel

from configs.runtime.gpus import hold, visible
from configs.runtime.process import return_freed_blocks
from configs.schema import Config, LearnerConfig
from learner.errors import BadModel
from learner.model.collectives import Facts, gather_facts, sums
from learner.model.head import Candidates, ChunkLoss, ValueLoss
from learner.model.loading import load_to_train, make_optimiser
from learner.model.lora import adapt, adapted
from learner.model.placement import Placement
from learner.model.scorer import TokenScorer, TokenScores
from learner.model.shards import Partitioned, Scattered, Shards, Whole
from learner.model.value import value_head_of
from learner.packing import MicroBatch
from weight_sync.adapter import PREFIX

with contextlib.redirect_stdout(sys.stderr):
    import deepspeed
    from deepspeed.utils import groups

_ds_logger = logging.getLogger("DeepSpeed")
_ds_logger.handlers.clear()  # its own handler writes to stdout
_ds_logger.propagate = True
_ds_logger.setLevel(logging.ERROR)


def join_process_group(
    store: distributed.Store, placement: Placement, config: LearnerConfig, deadline_s: float = 0.0
) -> None:
    """Make this process a rank of those in `placement`; a collective of all that takes more than
    `deadline_s` (default `step_deadline_s`) raises. DeepSpeed's own groups have no such bound: the
    caller's phases do.
    """
    if placement.interface:
        name = f"={placement.interface}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)  # read once a process
    with _quietly(placement):
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=placement.rank,
            world_size=len(placement.nodes),
            timeout=timedelta(seconds=deadline_s or config.step_deadline_s),
        )


class Training(ABC):
    """A model in training and its optimiser; which, and what it computes, a subclass says.

    One of a kind per process: `close()` before making another, the last made first.
    """

    def __init__(
        self, config: Config, model_path: str | None = None, placement: Placement | None = None
    ) -> None:
        """Load `model_path` (default `model.path`); `placement`: where the ranks are, all on this
        host by default. Raises BadModel, also for too high a rank.
        """
        learner = config.learner
        if not distributed.is_initialized() and learner.ranks == 1:
            join_process_group(distributed.HashStore(), Placement.on_one_host(0, 1), learner)
        found = distributed.get_world_size() if distributed.is_initialized() else 1
        if found != learner.ranks:
            raise BadModel(
                f"learner.ranks = {learner.ranks!r}, but this process is one of {found}: start "
                "every rank (`python -m learner.worker CONFIG --rank R`)"
            )
        self.rank, self.ranks = distributed.get_rank(), learner.ranks
        placement = placement or Placement.on_one_host(self.rank, self.ranks)
        self._on_close = contextlib.ExitStack()
        self._hold_gpu(placement)
        self._stage, self._offload = learner.zero_stage, learner.offload
        self.model, module = self._make(config, model_path)
        self._trainable = {n: w for n, w in self.model.named_parameters() if w.requires_grad}
        of_model = set(map(id, self.model.parameters()))
        self._beside = {n: w for n, w in module.named_parameters() if id(w) not in of_model}
        self._trainable |= self._beside
        self._adapted = adapted(self.model)
        self._bf16 = any(weight.dtype == torch.bfloat16 for weight in self._trainable.values())
        self._begin(config, placement, module)
        self._norm: Tensor | None = None
        if self._clips_itself:
            self._max_norm = learner.max_grad_norm
            self._optimiser.register_step_pre_hook(self._clip)
        self.shards: Shards = self._find_shards()
        self.device = self._engine.device

    def _hold_gpu(self, placement: Placement) -> None:
        if names := list(gpus := visible()):
            own = names[placement.local_rank % len(names)]
            held = hold([own], gpus)  # engines that join keep off it
            self._on_close.callback(held.release)

    @abstractmethod
    def _make(self, config: Config, model_path: str | None) -> tuple[nn.Module, nn.Module]:
        """The model whose weights are trained, and the module around it that DeepSpeed runs, whose
        own weights are trained beside the model's and belong to no model that is given away.
        """

    def _begin(self, config: Config, placement: Placement, module: nn.Module) -> None:
        """Start DeepSpeed. Raises BadModel where no host can hold the copy that is asked for."""
        if self._stage == 3:
            # It asks for the launcher's variable at every forward pass, and replaces torch's linear
            # by one that does not keep weights (in bf16 that rounds before the bias is added).
            self._on_close.enter_context(_environment(_local_rank(placement)))
            self._on_close.callback(setattr, functional, "linear", functional.linear)
        shared = placement.secondary_partition(config.learner)
        self._copies_within_hosts = shared > 1
        # DeepSpeed keeps the group of a host for the process, and the next engine would take it.
        self._on_close.callback(setattr, groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", None)
        of_model = [w for name, w in self._trainable.items() if name not in self._beside]
        own = [each for each in (of_model, list(self._beside.values())) if each]
        optimiser = make_optimiser(own, config.learner)
        with _quietly(placement), _words_into(config.run_dir):
            self._engine, self._optimiser, _, _ = deepspeed.initialize(
                model=module,
                optimizer=optimiser,
                config=_deepspeed_config(config.learner, self._bf16, shared),
                dist_init_required=False,
            )

    def step(self, *rates: float) -> float:
        """Clip, step, clear the gradients; return the norm of the whole gradient before clipping.
        `rates`: the model's, and that of what is trained beside it where there is something.

        A gradient that is not finite gives a norm that is not finite.
        """
        for group, rate in zip(self._optimiser.param_groups, rates, strict=True):
            group["lr"] = rate
        return_freed_blocks()  # an optimiser's blocks fit none of the gaps that passes leave
        self._engine.step()
        return_freed_blocks()
        return float(self._engine.get_global_grad_norm() if self._norm is None else self._norm)

    def gather(self, facts: list[Facts]) -> list[Facts]:
        """The facts of all ranks, in the order of ranks, on every rank."""
        return gather_facts(facts, self.device) if self.ranks > 1 else facts

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of these numbers over all ranks, on every rank."""
        return sums(values, self.device) if self.ranks > 1 else list(values)

    def trainable(self) -> dict[str, Tensor]:
        """The live trainable parameters by Hugging Face name, tied ones once, and what is trained
        beside them by its own; empty at stage 3.
        """
        return self._trainable

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight by Hugging Face name, also where it is scattered."""
        return {
            name: tuple(getattr(weight, "ds_shape", weight.shape))
            for name, weight in self.model.named_parameters()
        }

    def optimiser_state(self) -> dict[Tensor, dict[str, Any]]:
        """The optimiser's live state by master tensor, as `shards.masters()` lists them."""
        base = getattr(self._optimiser, "optimizer", self._optimiser)
        state: dict[Tensor, dict[str, Any]] = base.state
        return state

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by Hugging Face name, tied ones once, detached but not copied, or merged
        with its adapter, in fp32; at stage 3 each is gathered when its turn comes.
        """
        layers = {f"{path}.weight": layer for path, layer in self._adapted.items()}
        for name, weight in self.model.named_parameters():
            if name in layers:
                with self._gathered(*layers[name].parameters()):
                    yield name, layers[name].merged()
            elif not self._adapted or not weight.requires_grad:
                with self._gathered(weight):
                    yield name, weight.detach()

    def named_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the adapter, fp32, by PEFT's names; otherwise as `named_weights`."""
        for name, weight in self._trainable.items() if self._adapted else ():
            if name not in self._beside:
                with self._gathered(weight):
                    yield PREFIX + name, weight.detach()

    def close(self) -> None:
        """Release DeepSpeed; the process group stays, because DeepSpeed keeps handles on it."""
        self._engine.destroy()
        self._on_close.close()

    def _backward(self, value: Tensor) -> None:
        # DeepSpeed can sum over ranks, except at stage 3, where it always averages.
        self._engine.backward(value * self.ranks if self._stage == 3 else value)

    @property
    def _clips_itself(self) -> bool:
        # Without an optimiser of its own DeepSpeed clips but keeps no norm.
        return self._stage == 0 and not self._bf16

    def _clip(self, *_: object) -> None:
        weights = self._trainable.values()
        self._norm = torch.nn.utils.clip_grad_norm_(weights, self._max_norm)

    def _find_shards(self) -> Shards:
        optimiser = self._optimiser
        if self._clips_itself:
            return Whole(self._trainable, None, self.rank, self.ranks)
        if self._stage == 0:
            own = chain.from_iterable(optimiser.fp32_groups)
            masters = dict(zip(self._trainable, own, strict=True))
            # DeepSpeed made the moments by a step without gradient, which decays and counts.
            optimiser.optimizer.state.clear()
            for name, weight in self._trainable.items():
                masters[name].data.copy_(weight)
            return Whole(self._trainable, masters, self.rank, self.ranks)
        if self._stage == 3:
            return Scattered(
                self._trainable,
                optimiser.fp32_partitioned_groups_flat,
                optimiser.fp16_partitioned_groups_flat,
                self._release,
            )
        if self._stage == 1 and self._bf16 and self._offload != "cpu":
            masters, flats = optimiser.fp32_groups_flat_partition, optimiser.bf16_groups_flat
            parts = optimiser.bf16_partitioned_groups
        else:
            masters, flats = optimiser.single_partition_of_fp32_groups, optimiser.bit16_groups_flat
            parts = optimiser.parallel_partitioned_bit16_groups
        return Partitioned(self._trainable, masters, flats, [group[self.rank] for group in parts])

    def _release(self) -> None:
        """Drop what is still gathered, and the copies within hosts: both are of older weights."""
        self._optimiser.parameter_offload.partition_all_parameters()
        if self._copies_within_hosts:
            self._optimiser.invalidate_secondary_tensor()

    def _gathered(self, *weights: Tensor) -> contextlib.AbstractContextManager[Any]:
        if self._stage == 3:
            return deepspeed.zero.GatheredParameters([*weights])  # type: ignore[no-any-return]
        return contextlib.nullcontext()


class Engine(Training):
    """The policy."""

    model: PreTrainedModel

    def _make(self, config: Config, model_path: str | None) -> tuple[nn.Module, nn.Module]:
        model = load_to_train(config, model_path)
        if config.learner.lora.rank:
            adapt(model, config.learner.lora, config.seed)
        chunk_bytes = config.learner.chunk_bytes(_place())
        value_head = value_head_of(model, config.learner)
        return model, TokenScorer(model, chunk_bytes, config.model.head_dtype, value_head)

    def score(self, micro: MicroBatch, temperature: float, top_k: int = 0) -> TokenScores:
        """Log-probs and entropies of the action tokens, without gradient; with `top_k` the
        likeliest tokens beside them, and the values of a critic on the same trunk.
        """
        given = micro.tokens, micro.loss_mask, temperature
        found = Candidates.room(len(micro.rows), top_k, self.device) if top_k else None
        values = torch.empty(micro.tokens.shape, device=self.device) if self._beside else None
        with torch.no_grad():
            logprobs, entropy, _ = self._engine(*given, likeliest=found, values=values)
        return TokenScores(logprobs, entropy, found, values)

    def accumulate(
        self,
        micro: MicroBatch,
        temperature: float,
        loss: ChunkLoss,
        bonus: Tensor | None = None,
        *,
        candidates: Tensor | None = None,
        value_loss: ValueLoss | None = None,
    ) -> TokenScores:
        """Add this share's gradient to the step's sum; return the scores it was made from, with
        those of `candidates` int[N, k], which the loss is then given too. `bonus` float[N]: how
        much the entropy of each token takes off the loss; `value_loss` is added to it.
        """
        given = micro.tokens, micro.loss_mask, temperature, loss, bonus
        more = {"candidates": candidates, "value_loss": value_loss}
        logprobs, entropy, value = self._engine(*given, **more)
        self._backward(value)
        return TokenScores.of(logprobs, entropy, candidates)

    def probe(self, tokens: Sequence[int]) -> list[float]:
        """Log-prob of each of tokens[1:] given its prefix, at temperature 1: float[n − 1]."""
        row = torch.tensor([list(tokens)], device=self.device)
        mask = torch.ones_like(row, dtype=torch.bool)
        mask[:, 0] = False
        with torch.no_grad():
            logprobs, _, _ = self._engine(row, mask, 1.0)
        values: list[float] = logprobs.tolist()
        return values


def _deepspeed_config(
    learner: LearnerConfig, bf16: bool, secondary_partition: int = 1
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # The number of micro-batches varies: step() is the boundary, and losses are already shares.
        "managed_gradient_accumulation": False,
        "gradient_clipping": learner.max_grad_norm,
        "zero_optimization": {
            "stage": learner.zero_stage,
            # Small tensors would stay gathered and never see a swap.
            "stage3_param_persistence_threshold": 0,
            "zero_hpz_partition_size": secondary_partition,
        },
        "zero_allow_untested_optimizer": True,
        # A gradient joins the fp32 sum as soon as it is whole: else all are held twice.
        "bf16": {"enabled": bf16, "check_grad_overflow": True, "immediate_grad_update": bf16},
        "steps_per_print": None,
    }
    if learner.offload == "cpu":
        pinned = torch.cuda.is_available()
        place = {"device": "cpu", "pin_memory": pinned}
        settings["zero_optimization"]["offload_optimizer"] = place
        settings["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's own would be compiled
    if learner.zero_stage < 3:
        settings["gradient_allreduce_op"] = "sum"
    if learner.zero_stage == 0 and not bf16:
        settings["gradient_clipping"] = 0.0
    if learner.zero_stage and bf16:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _place() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def _quietly(placement: Placement) -> Iterator[None]:
    """Keep DeepSpeed from asking for a launcher's variables, compiling and writing to stdout, and
    gloo from listening elsewhere than towards the other ranks.
    """
    # DeepSpeed would compile shared-memory collectives at first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    variables = _local_rank(placement)
    if sys.platform == "linux":  # gloo opens a listener per group even for one rank
        variables["GLOO_SOCKET_IFNAME"] = placement.interface or "lo"
    with _environment(variables), contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _words_into(run_dir: str) -> Iterator[None]:
    """Have what is printed meanwhile, DeepSpeed's words on memory, in the run's `deepspeed.log`."""
    if not run_dir:
        yield
        return
    path = Path(run_dir, "deepspeed.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        yield


def _local_rank(placement: Placement) -> dict[str, str]:
    return {"LOCAL_RANK": str(placement.local_rank % max(torch.cuda.device_count(), 1))}


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
