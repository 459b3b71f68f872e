"""The retriever of a run: a client of its retrieval server, or the log of a recorded run.

A 503 is retried in `retrieval_server/client.py` (`_Attempts`); one that lasts ends the rollout as a
failed lease, to be leased again (`_serve` in `actors/runner.py`): it is never text or a reward.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from actors.environments.base import shown_order
from configs.load import ConfigError, retrieval_urls
from configs.retrieval import RetrievalConfig
from configs.schema import Config
from replay.log.history import Searched, SearchLog
from replay.protocol import ReplayError
from retrieval_server.auth import read_token
from retrieval_server.client import RetrievalClient
from retrieval_server.protocol import CorpusError, NotRecorded, Passage, RetrievalError

_NO_SCORE = float("nan")  # scores are not on record
_SHOWN = 200  # characters of a query that a message quotes

Results = dict[str, tuple[str, ...]]  # query → passage ids, best first


def open_retrieval(config: Config) -> "Retrieval":
    """Make the configured retriever, for `async with`. Raises ConfigError."""
    asked = config.retrieval
    if asked.recorded:
        return RecordedRetriever.open(config)
    return RetrievalClient(
        retrieval_urls(config),
        timeout_s=asked.timeout_s,
        retries=asked.retries,
        max_connections=asked.max_connections,
        token=read_token(asked.token_file),
        cache_queries=asked.cache_queries,
        index_version=asked.index_version,
    )


class RecordedRetriever:
    """Answers searches as a recorded run's were; use as `async with`, like a RetrievalClient.

    Log and corpus are read once, at the start. The log holds a search's passages in the order
    shown, so the server's own order is recovered first. A search that is not on record is an error,
    never an empty result.
    """

    index_version = ""  # which one it was is not on record

    def __init__(
        self, run: str, top_k: int, results: Results, passages: Mapping[str, Passage]
    ) -> None:
        """`run` was recorded with `top_k`; `passages` holds, by id, all that `results` names."""
        self._run, self._top_k = run, top_k
        self._results, self._passages = results, passages
        self._requests = self._errors = 0

    @classmethod
    def open(cls, config: Config) -> Self:
        """Read the run that `retrieval.recorded` names. Raises ConfigError, naming the field, where
        the log cannot be read whole, contradicts itself or asked for less than `retrieval.top_k`,
        and where the corpus lacks a passage.
        """
        run = config.retrieval.recorded
        log = SearchLog(run)
        try:
            recorded = log.config
            results = results_of(log.rollouts(), recorded.actors.shuffle_passages)
        except (ReplayError, ValueError) as error:
            raise ConfigError(
                f"retrieval.recorded = {run!r}: {error}: name the directory of a recorded run, or "
                "leave it empty to search with a server"
            ) from error
        if recorded.retrieval.is_live:
            answers = recorded.retrieval.live.record or f"{run}/live/answers.jsonl"
            raise ConfigError(
                f"retrieval.recorded = {run!r}: that run searched the live web, whose answers are "
                "on a record of their own: leave it empty, and say "
                f"retrieval.kind={recorded.retrieval.kind} retrieval.live.replay={answers}"
            )
        if log.compacted:
            raise ConfigError(
                f"retrieval.recorded = {run!r}: {log.compacted} rollouts were compacted away "
                "(forage compact), their searches with them: name a copy from before"
            )
        top_k = recorded.retrieval.top_k
        if config.retrieval.top_k > top_k:
            raise ConfigError(
                f"retrieval.top_k = {config.retrieval.top_k!r}: the run in retrieval.recorded = "
                f"{run!r} asked for {top_k}: give at most that, or search with a server"
            )
        corpus = corpus_of(config.retrieval) or corpus_of(recorded.retrieval)
        return cls(run, top_k, results, passages_of(results, corpus, run))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Return at most `top_k` passages per query as found then, unscored. Raises NotRecorded."""
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k!r}")
        self._requests += 1
        try:
            return [self._found(query, top_k) for query in queries]
        except NotRecorded:
            self._errors += 1
            raise

    def gauges(self) -> dict[str, float]:
        """Return counts, under a RetrievalClient's names, and the number of queries on record."""
        return {
            "retrieval/requests": float(self._requests),
            "retrieval/errors": float(self._errors),
            "retrieval/recorded_queries": float(len(self._results)),
        }

    def _found(self, query: str, top_k: int) -> list[Passage]:
        ids = self._results.get(query)
        if ids is None or top_k > self._top_k:
            raise NotRecorded(
                f"query {_quoted(query)} with top_k {top_k} is not on record in {self._run}, which "
                f"has {len(self._results)} queries with top_k {self._top_k}: repeat that run's own "
                "rollouts (its model, seed and settings), or leave retrieval.recorded empty to "
                "search with a server"
            )
        return [self._passages[each] for each in ids[:top_k]]


Retrieval = RetrievalClient | RecordedRetriever


def results_of(rollouts: Iterable[Searched], shuffled: bool) -> Results:
    """Return each query's passages, best first. `shuffled`: they were shown in another order.

    Where the same passages came in another order later (equal scores differ in their last bits with
    the batch that a dense index was asked in), the first order counts. Raises ValueError where the
    same query found other passages.
    """
    results: Results = {}
    for query, ids in _searches(rollouts, shuffled):
        first = results.setdefault(query, ids)
        if sorted(first) != sorted(ids):
            raise ValueError(
                f"query {_quoted(query)} brought {_named(first)} first and {_named(ids)} later: "
                "the index was another one, so what it brings cannot be told"
            )
    return results


def corpus_of(retrieval: RetrievalConfig) -> str:
    """Return its corpus, or its index's; '' where neither is named. Raises ConfigError."""
    # Imported late: it brings pyarrow, which no actor needs whose searches a server answers.
    from retrieval_server.index import manifest

    folder = Path(retrieval.index)
    if retrieval.corpus or not retrieval.index or not (folder / manifest.NAME).is_file():
        return retrieval.corpus
    try:
        return manifest.read(folder).corpus_path
    except RetrievalError as error:
        raise ConfigError(f"retrieval.index = {retrieval.index!r}: {error}") from error


def passages_of(results: Results, corpus: str, run: str) -> dict[str, Passage]:
    """Read the passages that the results name from a corpus file. Raises ConfigError."""
    wanted = {each for ids in results.values() for each in ids}
    if not wanted:
        return {}
    if not corpus:
        raise ConfigError(
            f"retrieval.recorded = {run!r}: that run names no corpus of its own: say where the "
            "passages are that its server searched: retrieval.corpus=FILE"
        )
    from retrieval_server.corpus_files import rows

    found: dict[str, Passage] = {}
    try:
        for where, each in rows(Path(corpus)):
            if (id := str(each.id)) in wanted:
                if id in found:
                    raise CorpusError(f"{where}: id = {id!r}: another passage has it too")
                found[id] = Passage(id, each.contents, _NO_SCORE)
    except RetrievalError as error:
        raise ConfigError(f"retrieval.corpus = {corpus!r}: {error}") from error
    if missing := sorted(wanted - found.keys()):
        raise ConfigError(
            f"retrieval.corpus = {corpus!r} does not hold {_named(missing)}, which the run in "
            f"retrieval.recorded = {run!r} found: name the corpus that it searched: "
            "retrieval.corpus=FILE"
        )
    return found


def _searches(
    rollouts: Iterable[Searched], shuffled: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for rollout in rollouts:
        for turn, searches in enumerate(rollout.turns):
            for search in searches:
                if search.status == "skipped":
                    continue
                ids = search.passage_ids
                if shuffled:
                    lease = (rollout.seed, rollout.group_id, rollout.sibling)
                    order = shown_order(*lease, turn, len(ids))
                    ids = tuple(shown for _, shown in sorted(zip(order, ids, strict=True)))
                yield search.query, ids


def _quoted(query: str) -> str:
    return repr(query if len(query) <= _SHOWN else query[: _SHOWN - 1] + "…")


def _named(ids: Sequence[str]) -> str:
    shown = ", ".join(map(repr, ids[:10]))
    rest = f" and {len(ids) - 10} more" if len(ids) > 10 else ""
    return f"passages {shown}{rest}" if ids else "nothing"
