"""An account of a run's every text: that trajectories hold nothing but what belongs there.

It reads `<run>/events.log`, the run's own tokenizer and corpus, and asks a sound retrieval server.
Faults are each prompt that is not its question, each observation that is not, token for token, made
of passages of the corpus (or the correction), and each search whose passages are not the query's.
Compacted trajectories are left out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from actors.prompt import Prompter, Tokens, load_tokenizer
from actors.retrieval import corpus_of
from configs import trust
from configs.environment import EnvironmentConfig
from configs.load import ConfigError, load
from replay.codec import decode_trajectory
from replay.log.event_log import FILE_NAME, read
from replay.log.history import deliveries
from replay.trajectory import Question, Search, Trajectory, Turn
from retrieval_server.corpus import load_corpus
from retrieval_server.protocol import Passage

Find = Callable[[Sequence[str], int], list[list[str]]]
ASKED_AT_ONCE = 1024
ANSWER_S = 60.0


@dataclass
class Texts:
    """The counts of what was looked at, and its faults."""

    trajectories: int = 0
    observations: int = 0
    searches: int = 0
    faults: list[str] = field(default_factory=list)


def audit_texts(run_dir: Path, find: Find, trusted: bool = False) -> Texts:
    """Look at every trajectory on record. Raises LogError, ConfigError."""
    config = load(run_dir / "config.yaml")
    source = str(run_dir / "config.yaml")
    trust.require(config, source=source, trust=trusted, of=trust.LEARNING, settable=False)
    _require_known(config.environment)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    searches = (search for _, each in _trajectories(run_dir) for search in _searches(each))
    shown = {name for search in searches for name in search.passage_ids}
    corpus = ((str(each.id), each.contents) for each in load_corpus(corpus_of(config.retrieval)))
    judge = _Judge(
        Prompter(tokenizer, config.questions, config.actors),
        {name: Passage(name, contents, 0.0) for name, contents in corpus if name in shown},
    )
    texts, found = Texts(), dict[str, set[frozenset[str]]]()
    for question, trajectory in _trajectories(run_dir):
        texts.trajectories += 1
        name = f"group {trajectory.group_id} sibling {trajectory.sibling}"
        texts.faults += (f"{name}: {fault}" for fault in judge.faults(question, trajectory))
        for search in _searches(trajectory):
            texts.searches += 1
            if search.status != "skipped":
                found.setdefault(search.query, set()).add(frozenset(search.passage_ids))
        texts.observations += sum(len(turn.observation_tokens) > 0 for turn in trajectory.turns)
    sound = find(list(found), config.retrieval.top_k) if found else []
    for (query, seen), ids in zip(found.items(), sound, strict=True):
        texts.faults += (f"{query!r} found {set(s)}, not {ids}" for s in seen - {frozenset(ids)})
    return texts


def finds_of(url: str) -> Find:
    """A `Find` of the retrieval server at this base URL: the passages' ids."""

    def find(queries: Sequence[str], top_k: int) -> list[list[str]]:
        rows: list[list[str]] = []
        for begin in range(0, len(queries), ASKED_AT_ONCE):
            body = {"queries": queries[begin : begin + ASKED_AT_ONCE], "topk": top_k}
            reply = httpx.post(f"{url}/retrieve", json=body, timeout=ANSWER_S, trust_env=False)
            found = reply.raise_for_status().json()["result"]
            rows += [[str(document["id"]) for document in row] for row in found]
        return rows

    return find


def _require_known(settings: EnvironmentConfig) -> None:
    """Raise ConfigError for texts that are made otherwise than search_r1's own are."""
    known = EnvironmentConfig(queries_per_turn=settings.queries_per_turn)
    for name in known.__struct_fields__:
        if (value := getattr(settings, name)) != getattr(known, name):
            raise ConfigError(
                f"environment.{name} = {value!r}: of such a run the texts cannot be accounted for"
            )


def _trajectories(run_dir: Path) -> Iterator[tuple[Question, Trajectory]]:
    for opened, delivered in deliveries(read(run_dir / FILE_NAME)):
        if delivered.payload:
            yield opened.question, decode_trajectory(delivered.payload)


def _searches(trajectory: Trajectory) -> Iterator[Search]:
    return (search for turn in trajectory.turns for search in turn.searches)


@dataclass
class _Judge:
    """The prompts and observations as they must be."""

    prompter: Prompter
    passages: dict[str, Passage]

    def faults(self, question: Question, trajectory: Trajectory) -> Iterator[str]:
        """The faults of one trajectory."""
        if not np.array_equal(trajectory.prompt_tokens, self.prompter.question(question)):
            yield f"the prompt is {self.prompter.decode(trajectory.prompt_tokens)!r}"
        last = len(trajectory.turns) - 1
        for number, turn in enumerate(trajectory.turns):
            if number == last and not len(turn.observation_tokens):
                continue  # nothing more was read
            seen = self.prompter.decode(turn.observation_tokens)
            shown = {name for search in turn.searches for name in search.passage_ids}
            if unknown := shown - self.passages.keys():
                yield f"turn {number}: {unknown} are no passages of the corpus: {seen!r}"
            elif not np.array_equal(turn.observation_tokens, self._observation(turn)):
                yield f"turn {number}: not what was found: {seen!r}"

    def _observation(self, turn: Turn) -> Tokens:
        if turn.malformed:
            return self.prompter.correction()
        if not turn.searches:
            return np.empty(0, np.int32)
        found = ([self.passages[name] for name in each.passage_ids] for each in turn.searches)
        return self.prompter.observation(*found)
