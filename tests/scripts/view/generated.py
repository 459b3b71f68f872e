"""A run of any length, as a long one leaves it: by a real ledger and log, without a model.

Four actors write rollouts of one to four turns that search, earn more as the run goes on, and are
delivered at times that its steps take; some groups are dropped, evaluations are made, one actor
leaves and comes back. Of their engines the launcher has told something else each second. Questions,
searches and passages are of made-up words.
"""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from configs.load import save
from configs.schema import ActorsConfig, Config, LearnerConfig, ModelConfig, ReplayConfig
from learner.health.sentinels import FILE_NAME as SENTINELS
from learner.metrics.applications import FILE_NAME as APPLICATIONS
from replay.codec import decode_trajectory, encode_trajectory
from replay.ledger.events import Event
from replay.ledger.ledger import Ledger
from replay.log.event_log import FILE_NAME, EventLog
from replay.log.records import RunStarted
from replay.log.summary import summarise
from replay.protocol import (
    Batch,
    Committed,
    Deliver,
    Evaluate,
    Goodbye,
    Hello,
    Lease,
    Leases,
    Ready,
    Refused,
    Report,
    Resume,
    Sample,
    Stop,
)
from replay.questions import Questions
from replay.trajectory import (
    Question,
    Sampling,
    Search,
    StopReason,
    TokenSequence,
    Trajectory,
    Turn,
)
from scripts.runs.waits_log import FILE_NAME as WAITS
from tests.learner.health.record import WATCHED
from tests.scripts.conftest import as_text
from tests.scripts.view.conftest import keep_tokens

BEGUN = 1.7e9  # seconds since the epoch
STEP_S, TURN_S, SEARCH_S = 20.0, 2.0, 0.3
ACTORS = tuple(f"actor-{n}" for n in range(4))
LEAVES = ACTORS[-1]
CAPACITY = 96  # rollouts in flight, of each
GROUPS, SIBLINGS = 32, 8
ASKED, HELD_OUT = 400, 24  # questions
EVAL_EVERY, WITH_TOKENS = 50, 20  # steps
OTHERS = tuple(f"learner/other_{n}" for n in range(120))  # gauges that nobody draws unasked
WORDS = tuple(a + b for a in ("ka", "be", "ri", "so", "mu") for b in ("lu", "ro", "ni", "ta", "ke"))


class GeneratedRun:
    """Writes it into a folder; `delivered` counts the rollouts, `trained` the steps."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        model = path.with_name(f"{path.name}-model")
        tokenizer.save_pretrained(model)
        path.mkdir()
        self.path, self.delivered, self.trained = path, 0, 0
        self.config = Config(
            run_dir=str(path),
            model=ModelConfig(path=str(model), dtype="float32", max_model_len=512),
            actors=ActorsConfig(count=len(ACTORS), rollouts_in_flight=CAPACITY),
            replay=ReplayConfig(groups_per_step=GROUPS, group_size=SIBLINGS, max_staleness=3),
            learner=LearnerConfig(total_steps=10**6, eval_every=EVAL_EVERY),
        )
        save(self.config, path / "config.yaml")
        self._random, self._now = np.random.default_rng(0), BEGUN
        self._leases = deque[tuple[str, float, Lease]]()  # with who has it, and since when
        self._encoded = {text: np.array(tokenizer.encode(text), np.int32) for text in _texts()}
        self._batches = deque[Batch](maxlen=WITH_TOKENS)
        train = tuple(_question(n, "train") for n in range(ASKED))
        held_out = tuple(_question(n, "eval") for n in range(HELD_OUT))
        self._ledger = Ledger(
            self.config.replay,
            Questions(train, self.config.seed),
            held_out,
            Sampling(1.0, self.config.seed),
            lambda payload: summarise(decode_trajectory(payload)),
        )

    def write(self, rollouts: int) -> None:
        """Write until so many rollouts have been delivered, and a step more has been trained."""
        with (
            EventLog.create(self.path / FILE_NAME) as self._log,
            (self.path / APPLICATIONS).open("w") as self._applied,
            (self.path / SENTINELS).open("w") as self._noted,
            (self.path / WAITS).open("w") as self._sampled,
        ):
            self._log.append([RunStarted(self._now, self.config.seed, as_text(self.config))])
            self._send("learner", Resume(1, 0))
            for actor in ACTORS:
                self._send(actor, Hello(actor, "digest"))
            while self.delivered < rollouts:
                self._step()
        for batch in self._batches:
            keep_tokens(self.path, batch)

    def _step(self) -> None:
        step = self.trained
        if step % EVAL_EVERY == 0:
            self._send("learner", Evaluate(1, step))
        if step % EVAL_EVERY == EVAL_EVERY // 2:
            self._send(LEAVES, Goodbye(LEAVES))
            self._leases = deque(each for each in self._leases if each[0] != LEAVES)
            self._now += 1.0
            self._send(LEAVES, Hello(LEAVES, "digest"))
        begun = self._now
        for actor in ACTORS:
            self._send(actor, Ready(actor, CAPACITY, 1, step))
            self._applied.write(f"{json.dumps([self._now, actor, step, 0.4, 0.1])}\n")
        while not isinstance(batch := self._send("learner", Sample(1, step)), Batch):
            self._deliver(SIBLINGS)
        self._now = max(self._now, begun + 0.5 * STEP_S)
        self.trained += 1
        self._batches.append(batch)
        self._report(begun)
        self._sample(begun)
        self._log.sync()

    def _deliver(self, count: int) -> None:
        """Deliver those that were leased first; whoever has room is given more."""
        if not self._leases:
            for actor in ACTORS:
                self._send(actor, Ready(actor, CAPACITY, 1, self.trained))
        for _ in range(min(count, len(self._leases))):
            actor, since, lease = self._leases.popleft()
            self._now += STEP_S / GROUPS / SIBLINGS
            payload = encode_trajectory(self._rollout(actor, since, lease))
            self._send(actor, Deliver(actor, lease.group_id, lease.sibling, payload))
            self.delivered += 1

    def _report(self, begun: float) -> None:
        step, random = self.trained, self._random
        gauges = dict(zip(OTHERS, random.random(len(OTHERS)).tolist(), strict=True))
        watched = dict(
            zip(WATCHED, (0.5 + 0.4 * random.random(len(WATCHED))).tolist(), strict=True)
        )
        spent = {"learner/update_s": 0.4 * STEP_S, "sync/publish_s": 0.2, "sync/published": step}
        waited = {"learner/wait_for_batch_s": max(0.0, self._now - begun - 0.5 * STEP_S)}
        self._send("learner", Report(1, step, gauges | watched | spent | waited))
        self._send("learner", Committed(1, step))
        note = {"step": step, "gauges": watched, "fired": ["ess"] * (step % 100 > 90)}
        self._noted.write(f"{json.dumps(note)}\n")

    def _sample(self, begun: float) -> None:
        """Tell of every second since then what each actor and its engine did."""
        for at in np.arange(np.ceil(begun), self._now).tolist():
            for actor in ACTORS:
                free, running, queued, kv = self._random.integers(0, (8, CAPACITY, 9, 101)).tolist()
                line = [at, actor, free, int(queued > 6), running, queued, kv]
                self._sampled.write(f"{json.dumps(line)}\n")

    def _send(self, peer: str, message: Any) -> Any:
        """Apply and write; the direct reply. Raises RuntimeError where it is a refusal."""
        outcome, direct = self._ledger.apply(Event(peer, message), self._now), None
        self._log.append(outcome.records)
        for whom, reply in outcome.replies:
            if isinstance(reply, Leases):
                self._leases += ((str(whom), self._now, lease) for lease in reply.leases)
            elif isinstance(reply, Refused | Stop):
                raise RuntimeError(f"{message}: {reply}")
            else:
                direct = reply
        return direct

    def _rollout(self, actor: str, since: float, lease: Lease) -> Trajectory:
        random, number = self._random, int(lease.question.id.rpartition("-")[2])
        count = 1 + int(random.integers(0, 4))
        turn_s = min(TURN_S, (self._now - since) / count)
        right = random.random() < min(0.9, 0.1 + self.trained / 500 + 0.2 * (number % 3))
        answer = lease.question.answers[0] if right else WORDS[int(random.integers(len(WORDS)))]
        turns = tuple(
            self._turn(number + place, since + place * turn_s, turn_s, "" if more else answer)
            for place, more in enumerate(range(count - 1, -1, -1))
        )
        return Trajectory(
            group_id=lease.group_id,
            sibling=lease.sibling,
            question_id=lease.question.id,
            kind=lease.kind,
            actor_id=actor,
            sampling=lease.sampling,
            sequences=(TokenSequence(self._encoded[lease.question.text], turns),),
            stop_reason=StopReason.ANSWERED,
            answer=answer,
            reward=float(answer == lease.question.answers[0]),
            reward_parts={"em": float(answer == lease.question.answers[0])},
            timings={"total_s": turn_s * count, "generate_s": turn_s * count * 0.8},
            attempt=lease.attempt,
        )

    def _turn(self, number: int, begun: float, lasts: float, answer: str) -> Turn:
        """A search, or with an answer the last one."""
        query = _query(number)
        said = self._encoded[f"<answer> {answer} </answer>" if answer else query]
        search = Search(query, (f"p-{number}", f"p-{number + 1}"), SEARCH_S * lasts, "ok")
        return Turn(
            action_tokens=said,
            behaviour_logprobs=-self._random.random(len(said), np.float32),
            policy_versions=np.full(len(said), self.trained, np.int32),
            observation_tokens=self._encoded[""] if answer else self._encoded[_passage(number)],
            searches=() if answer else (search,),
            malformed=not answer and number % 17 == 0,
            started_at=begun,
            first_token_at=begun + 0.1 * lasts,
            ended_at=begun + 0.6 * lasts,
        )


def _question(number: int, kind: str) -> Question:
    text = f"{kind} {number} : what is the {_query(number)} ?"
    return Question(f"{kind}-{number}", text, (WORDS[number % len(WORDS)],), 1 + number % 2)


def _query(number: int) -> str:
    return f"{WORDS[number % len(WORDS)]} of {WORDS[number // len(WORDS) % len(WORDS)]} {number}"


def _passage(number: int) -> str:
    about = " ".join(WORDS[number * n % len(WORDS)] for n in range(1, 9))
    return f"<information> {_query(number)} is {about} . </information>"


def _texts() -> Iterator[str]:
    """All that is said in such a run."""
    yield ""
    for word in WORDS:
        yield f"<answer> {word} </answer>"
    for number in range(ASKED + 4):  # a rollout's turns ask about the next ones
        yield from (_query(number), _passage(number))
        yield _question(number, "train").text
    yield from (_question(number, "eval").text for number in range(HELD_OUT))
