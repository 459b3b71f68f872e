"""The parts of `forage bench retrieval`, each of which is measured alone too.

`served`: servers, askers and what their indexes find; `overload`: more askers than can be served;
`scale`: rankers and vectors near wiki-18's size, and answers on the wiki task's corpus. Each keeps
its finished rows in a folder of its own.
"""

from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, get_args

from configs.runtime.process import REPOSITORY
from retrieval_server.corpus import load_corpus
from scripts.bench.harness import Processes, Report, Rows
from scripts.bench.retrieval import answers, scale
from scripts.bench.retrieval.corpus import draw_queries, siblings
from scripts.bench.retrieval.overload import Overload, overload_rows, overload_summary
from scripts.bench.retrieval.recall import build, recalls
from scripts.bench.retrieval.run import FEW, Bench, rows, summary
from scripts.wiki import wiki
from scripts.wiki.packages import WikiError

CACHE = REPOSITORY / ".cache" / "retrieval"
WIKI = REPOSITORY / ".cache" / "wiki"
WIKI_SEED = 0
UNITS = 16_384  # distinct queries; as many groups
SEED = 0
Figures = dict[str, Any]
Part = Literal["served", "overload", "scale"]
PARTS: tuple[Part, ...] = get_args(Part)


class Parts:
    """The parts of one run. `corpora`: of each kind of index; `fresh`: make indexes anew."""

    def __init__(
        self,
        processes: Processes,
        folder: Path,
        corpora: dict[str, Path],
        report: Report,
        *,
        quick: bool,
        fresh: bool,
    ) -> None:
        self._processes, self._folder, self._report = processes, folder, report
        self._corpora, self._quick, self._fresh = corpora, quick, fresh
        self._made: dict[str, tuple[Path, Figures]] = {}

    def measure(self, part: Part, kept: Rows, passages: int | None) -> Figures:
        """The figures of a part; `passages`: generated ones, as many as usual where None. Raises
        NoCorpus, RetrievalError, RunFailed.
        """
        match part:
            case "served":
                return self.served(kept)
            case "overload":
                return self.overload(kept)
            case "scale":
                return self.scale(kept, passages)

    def served(self, kept: Rows) -> Figures:
        """The figures of servers and askers, and what their indexes find. Raises RunFailed."""
        settings = {kind: self._settings(kind) for kind in self._corpora}
        settings["bm25-few"] = settings["bm25"] | {"max_waiting_queries": FEW}
        side_by_side = Bench(self._folder, self._processes, settings)
        side_by_side.units("single", [[query] for query in self._queries])
        side_by_side.units("groups", [siblings(query, SEED) for query in self._queries])
        found = []
        for row in (row for index in self._corpora for row in rows(index, self._quick)):
            self._report(row.name)
            found.append(kept.get(row.name, partial(side_by_side.measure, row)))
        self._report("recall")
        dense = self._corpora["dense"]
        measured = partial(recalls, self._processes, dense, self._folder, 1000)
        recall = kept.get("recall", measured)
        builds = {kind: cost for kind, (_, cost) in self._made.items()}
        return {**summary(found, recall), "rows": found, "builds": builds, "recall": recall}

    def overload(self, kept: Rows) -> Figures:
        """The figures of a slowed server under more askers than it can serve. Raises RunFailed."""
        settings = self._settings("bm25")
        overload = Overload(self._folder, self._processes, settings, self._queries)
        found = []
        for row in overload_rows(self._quick):
            self._report(f"overload: {row.name}")
            found.append(kept.get(["overload", row.name], partial(overload.measure, row)))
        return {**overload_summary(found), "overload": found}

    def scale(self, kept: Rows, passages: int | None) -> Figures:
        """The figures of so many generated passages, and of the wiki task's. Raises RunFailed."""
        size = passages or (scale.QUICK_PASSAGES if self._quick else scale.PASSAGES)
        queries = scale.QUICK_QUERIES if self._quick else scale.QUERIES
        large = scale.Scale(self._processes, kept, self._folder, CACHE, self._report)
        found = large.measure(size, self._corpora["dense"], queries, self._fresh)
        return found | answers.summary(self._answers(kept))

    def _answers(self, kept: Rows) -> Figures | None:
        try:
            files = wiki.find(WIKI, WIKI_SEED)
        except WikiError as error:
            self._report(f"answers are left out: {error}")
            return None
        self._report("answers on the wiki task's corpus")
        measured = partial(
            answers.answers, self._processes, files, self._folder, CACHE, self._fresh
        )
        found: Figures = kept.get(["answers", files.eval.parent.name], measured)
        return found

    def _settings(self, kind: str) -> Figures:
        """What a server of this kind of index reads; the index is made where it is not there."""
        corpus = self._corpora[kind]
        if kind not in self._made:
            self._report(f"building an index: {kind}")
            self._made[kind] = build(self._processes, corpus, CACHE, kind, self._fresh)
        index, _ = self._made[kind]
        return {"corpus": str(corpus.resolve()), "index": str(index), "threads": 2}

    @cached_property
    def _queries(self) -> list[str]:
        documents = load_corpus(self._corpora["bm25"])
        return draw_queries(documents, min(UNITS, 4 * len(documents)), SEED)
