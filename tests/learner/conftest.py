"""Random batches and an engine without DeepSpeed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from configs.schema import Config, LearnerConfig, ModelConfig, ReplayConfig
from learner.health.diagnostics import TokenFacts
from learner.model.head import Candidates, ChunkLoss, ValueLoss
from learner.model.scorer import TokenScorer, TokenScores, load_model
from learner.model.shards import Whole
from learner.model.value import ValueModel, value_head_of
from learner.packing import MicroBatch
from replay.codec import encode_trajectory
from replay.protocol import Batch
from replay.trajectory import Sampling, StopReason, TokenSequence, Trajectory, Turn

VOCABULARY = 20  # ids that the shared tiny model certainly has


class PlainEngine:
    """The engine's interface on plain torch: AdamW or SGD, clipping, summed gradients."""

    def __init__(self, config: Config):
        self.device = torch.device("cpu")
        self.model = load_model(config.model)
        value_head = value_head_of(self.model, config.learner)
        self.scorer = TokenScorer(self.model, value_head=value_head)
        self._max_norm = config.learner.max_grad_norm
        heads = [] if value_head is None else [value_head]
        groups = [{"params": list(each.parameters())} for each in (self.model, *heads)]
        self.optimiser = (
            torch.optim.SGD(groups)
            if config.learner.optimiser == "sgd"
            else torch.optim.AdamW(groups, betas=config.learner.betas, weight_decay=0.0)
        )

    @torch.no_grad()
    def score(self, micro: MicroBatch, temperature: float, top_k: int = 0) -> TokenScores:
        found = Candidates.room(len(micro.rows), top_k, self.device) if top_k else None
        given = micro.tokens, micro.loss_mask, temperature
        values = None if self.scorer.value_head is None else torch.empty(micro.tokens.shape)
        return TokenScores(*self.scorer(*given, likeliest=found, values=values)[:2], found, values)

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
        given = micro.tokens, micro.loss_mask, temperature, loss, bonus
        more = {"candidates": candidates, "value_loss": value_loss}
        logprobs, entropy, value = self.scorer(*given, **more)
        value.backward()
        return TokenScores.of(logprobs, entropy, candidates)

    def step(self, *rates: float) -> float:
        trained = self.trained()
        norm = nn.utils.clip_grad_norm_(trained.values(), self._max_norm)
        self.gradients = {n: w.grad.clone() for n, w in trained.items()}
        for group, rate in zip(self.optimiser.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(norm)

    def trained(self) -> dict[str, Tensor]:
        head = self.scorer.value_head
        beside = {} if head is None else {f"value_head.{n}": w for n, w in head.named_parameters()}
        return dict(self.model.named_parameters()) | beside

    def trainable(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    @property
    def shards(self) -> Whole:
        return Whole(self.trainable())

    def gather(self, facts: list[TokenFacts]) -> list[TokenFacts]:
        return facts

    def total(self, values: list[float]) -> list[float]:
        return values

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight.detach()) for name, weight in self.model.named_parameters())

    def probe(self, tokens: tuple[int, ...]) -> list[float]:
        return [0.0] * (len(tokens) - 1)


class PlainCritic:
    """The critic's interface on plain torch."""

    def __init__(self, config: Config):
        self.model, self._max_norm = ValueModel(load_model(config.model)), 1e9
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), betas=config.learner.betas, weight_decay=0.0
        )

    @torch.no_grad()
    def values(self, micro: MicroBatch) -> Tensor:
        return self.model(micro.tokens)

    def accumulate(self, micro: MicroBatch, loss: ValueLoss) -> Tensor:
        loss(values := self.model(micro.tokens)).backward()
        return values.detach()

    def trained(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    step, total = PlainEngine.step, PlainEngine.total


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def config(tiny_model_path: Path, tmp_path: Path) -> Config:
    return Config(
        run_dir=str(tmp_path / "run"),
        model=ModelConfig(path=str(tiny_model_path), dtype="float32"),
        replay=ReplayConfig(groups_per_step=2, group_size=3),
        learner=LearnerConfig(lr=1e-2, warmup_steps=0, total_steps=3, checkpoint_every=2),
    )


@pytest.fixture
def plain_engine(config: Config) -> PlainEngine:
    return PlainEngine(config)


@pytest.fixture(scope="session")
def make_plain_engine() -> type[PlainEngine]:
    return PlainEngine


@pytest.fixture(scope="session")
def make_plain_critic() -> type[PlainCritic]:
    return PlainCritic


def _turn(rng: np.random.Generator, version: int, observation: bool) -> Turn:
    actions = int(rng.integers(1, 6))
    return Turn(
        action_tokens=rng.integers(2, VOCABULARY, actions, dtype=np.int32),
        behaviour_logprobs=(-4.0 * rng.random(actions)).astype(np.float32),
        policy_versions=np.full(actions, version, np.int32),
        observation_tokens=rng.integers(
            2, VOCABULARY, int(rng.integers(1, 8)) if observation else 0, dtype=np.int32
        ),
    )


def _sequence(rng: np.random.Generator, version: int) -> TokenSequence:
    turns = int(rng.integers(1, 4))
    return TokenSequence(
        rng.integers(2, VOCABULARY, int(rng.integers(2, 9)), dtype=np.int32),
        tuple(_turn(rng, version, i + 1 < turns) for i in range(turns)),
    )


@pytest.fixture(scope="session")
def trajectory() -> Callable[..., Trajectory]:
    """Random trajectories with one to three turns a sequence; keywords override fields."""

    def make(seed: int = 0, version: int = 0, sequences: int = 1, **fields: object) -> Trajectory:
        rng = np.random.default_rng(seed)
        known = {
            "group_id": 1,
            "sibling": 0,
            "question_id": "q",
            "kind": "train",
            "actor_id": "actor-0",
            "sampling": Sampling(temperature=0.7),
            "sequences": tuple(_sequence(rng, version) for _ in range(sequences)),
            "stop_reason": StopReason.ANSWERED,
            "answer": "x",
            "reward": float(rng.integers(2)),
        }
        return Trajectory(**(known | fields))

    return make


@pytest.fixture(scope="session")
def batch(trajectory: Callable[..., Trajectory]) -> Callable[..., Batch]:
    """Batches of groups of three; only the first sibling earns 1: every group has signal. Sibling i
    has i mod `sequences` sequences more than one."""

    def make(
        step: int = 1, version: int = 0, groups: int = 2, seed: int = 0, sequences: int = 1
    ) -> Batch:
        ids = tuple(range(1, groups + 1))
        payloads = tuple(
            tuple(
                encode_trajectory(
                    trajectory(
                        seed + 100 * step + 10 * group + sibling,
                        version,
                        1 + sibling % sequences,
                        group_id=group,
                        sibling=sibling,
                        reward=float(sibling == 0),
                    )
                )
                for sibling in range(3)
            )
            for group in ids
        )
        return Batch(step, ids, (version,) * groups, payloads, {}, {}, ())

    return make
