"""The pace to be expected of a run on GPUs, reckoned from its sizes: how many rollouts are in
flight, how long turns, rollouts and steps take, what new weights cost.

Nothing of it is measured. Rollouts are taken to end half way to `model.max_model_len`, as an actor
takes its first capacity; "at most" is with every completion and context at its limit. What an
engine's workers tell one another is not counted.
"""

from dataclasses import dataclass
from functools import cached_property

from actors.policies.capacity import Capacity, mean_context
from configs.schema import Config
from learner.algorithm.passes import scores_current
from scripts.setup.gpu_memory import GIB
from scripts.setup.model_size import Model, token_bytes, width_of

PROMPT_TOKENS = 300  # Search-R1's, with a question
LAUNCH_S = 0.010  # of a step of the engine, beside what its bytes and tokens take
SEARCH_S = 1.0
# Of a weaker GPU of its kind: bytes/s and floating-point operations/s that are really reached. An
# L4 has 300 GB/s and 121 TFLOP/s, an A100 2 TB/s and 312, an H200 4.8 TB/s and 989.
SMALL, LARGE, LARGEST = (0.24e12, 40e12), (1.6e12, 125e12), (3.8e12, 400e12)


def speed_of(total: int) -> tuple[float, float]:
    """Bytes/s and operations/s to be expected of a GPU with so much memory."""
    return SMALL if total < 40 * GIB else LARGE if total < 100 * GIB else LARGEST


@dataclass(frozen=True)
class Pace:
    """Of a configuration whose sizes are found, on `gpus` of `total` bytes each."""

    config: Config
    model: Model
    total: int
    gpus: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that an engine's keys and values hold; 0 where config.json does not tell."""
        token = token_bytes(self.config, self.model)
        return self.config.actors.kv_cache_bytes // token if token else 0

    @property
    def context_tokens(self) -> int:
        """A rollout's context on average."""
        return mean_context(PROMPT_TOKENS, self.config.model.max_model_len)

    @property
    def rollouts_per_step(self) -> int:
        """Of a batch."""
        return self.config.replay.groups_per_step * self.config.replay.group_size

    @cached_property
    def in_flight(self) -> int:
        """Rollouts that an actor begins with; in all no more than replay admits."""
        actors, replay = self.config.actors, self.config.replay
        first = Capacity.of(
            self.kv_tokens,
            self.context_tokens,
            actors.max_num_seqs,
            replay.group_size,
            actors.rollouts_in_flight,
        )
        admitted = (replay.max_staleness + 1) * self.rollouts_per_step // actors.count
        return max(1, min(first.now, admitted))

    @property
    def _speed(self) -> tuple[float, float]:
        """Bytes/s and operations/s, halved where learner and engines share the GPUs."""
        wanted = self.config.learner.ranks + self.config.actors.count * self._workers
        shares = 1 + (wanted > self.gpus)
        moved, done = speed_of(self.total)
        return moved / shares, done / shares

    @property
    def _workers(self) -> int:
        """GPUs of an engine, each with its share of weights, keys and values."""
        return self.config.actors.tensor_parallel

    @property
    def prefill_s(self) -> float:
        """Seconds of a token that an engine takes in."""
        return 2 * self.model.parameters / (self._workers * self._speed[1])

    @cached_property
    def token_s(self) -> float:
        """Seconds between two tokens of a rollout, with all others in flight beside it."""
        width, running = width_of(self.config.engine_dtype), self.in_flight
        running = min(running, self.config.actors.max_num_seqs)
        contexts = running * self.context_tokens * token_bytes(self.config, self.model)
        moved = (width * self.model.parameters + contexts) / (self._workers * self._speed[0])
        return LAUNCH_S + max(moved, running * self.prefill_s)

    @property
    def turn_s(self) -> float:
        """Seconds of a turn with its search, at most."""
        return self.config.actors.max_action_tokens * self.token_s + SEARCH_S

    @property
    def sampled_tokens(self) -> int:
        """Of a rollout, at most."""
        actors, room = self.config.actors, self.config.model.max_model_len - PROMPT_TOKENS
        return min((actors.max_turns + 1) * actors.max_action_tokens, max(room, 1))

    @cached_property
    def undisturbed_s(self) -> float:
        """Seconds of the longest rollout where no new weights come."""
        taken_in = self.config.model.max_model_len * self.prefill_s
        searches = self.config.actors.max_turns * SEARCH_S
        return self.sampled_tokens * self.token_s + searches + taken_in

    @property
    def updates(self) -> int:
        """How many versions such a rollout meets."""
        return 1 + int(self.undisturbed_s / self.publish_s)

    @property
    def rollout_s(self) -> float:
        """Seconds of the longest rollout."""
        return self.undisturbed_s + self.updates * self.anew_s

    @property
    def passes(self) -> int:
        """Forward passes that a step costs: backward is two, made anew one, an average one, the
        current weights before the update one, and a critic's values one beside its own updates.
        """
        learner = self.config.learner
        averages = (learner.centre == "ema") + (learner.anchor != "none")
        update = 3 + learner.gradient_checkpointing
        critic = 1 + update * learner.critic.updates if learner.has_critic_model else 0
        return update + averages + scores_current(learner) + critic

    def _learn_s(self, tokens: int) -> float:
        spent = 2 * self.model.parameters * self.passes * tokens
        return spent / (self.config.learner.ranks * self._speed[1])

    @cached_property
    def step_s(self) -> float:
        """Seconds from step to step: of the slower of learner and actors."""
        rollouts, actors = self.rollouts_per_step, self.config.actors.count
        sampled_s = rollouts * self.undisturbed_s / 2 / (actors * self.in_flight)
        return max(self._learn_s(rollouts * self.context_tokens), sampled_s)

    @property
    def longest_step_s(self) -> float:
        """Seconds of the learner's work on a batch of rollouts at the context's limit."""
        return self._learn_s(self.rollouts_per_step * self.config.model.max_model_len)

    @property
    def publish_s(self) -> float:
        """Seconds between two versions."""
        return self.config.weight_sync.publish_every * self.step_s

    @property
    def anew_s(self) -> float:
        """Seconds in which an engine computes anew what an update took from its cache."""
        if self.config.weight_sync.in_flight == "keep":
            return 0.0
        return self.in_flight * self.context_tokens * self.prefill_s

    @property
    def anew_share(self) -> float:
        """The part of an engine's time that this takes."""
        return self.anew_s / self.publish_s

    @property
    def first_batch_s(self) -> float:
        """Seconds to the first batch: its rollouts in turn, and the last one's whole time."""
        waves = self.rollouts_per_step / (self.config.actors.count * self.in_flight)
        wanted = 2 if self.config.replay.drop_no_signal else 1
        return wanted * waves * self.undisturbed_s / 2 + self.rollout_s
