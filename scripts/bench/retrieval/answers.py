"""Answers on the wiki task's corpus: does tantivy bring them where bm25s does?

Of the task's held-out questions, how many have an answer in the first 3 passages that either ranker
finds for the question itself, as `forage data audit` counts them.
"""

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from configs.runtime.process import REPOSITORY
from scripts.bench.harness import Processes, at_least
from scripts.bench.retrieval.recall import build
from scripts.wiki.wiki import WikiFiles

RANKERS = ("bm25", "tantivy")
TOP = "3"
AUDIT_S = 600.0
GOALS = {"tantivy_top3_minus_bm25": at_least(-0.02)}
METHOD = {
    "tantivy_top3_minus_bm25": "shares of the wiki task's held-out questions with an answer in the "
    "first 3 passages for the question itself (forage data audit)",
}


def answers(
    processes: Processes, files: WikiFiles, folder: Path, cache: Path, fresh: bool
) -> dict[str, Any]:
    """The questions, and how many have an answer in the first 3 passages; `fresh`: by indexes made
    anew. Raises RunFailed.
    """
    found: dict[str, Any] = {}
    for kind in RANKERS:
        made, _ = build(processes, files.corpus, cache, kind, fresh)
        out = folder / f"answers-{kind}.json"
        settings = {
            "questions.train": "",
            "questions.eval": files.eval,
            "questions.eval_limit": 0,
            "retrieval.corpus": files.corpus,
            "retrieval.index": made,
            "retrieval.kind": kind,
        }
        given = [f"{field}={value}" for field, value in settings.items()]
        audit = ("data", "audit", str(REPOSITORY / "configs" / "base.yaml"), *given)
        command = ("-m", "scripts.cli", *audit, "--json", str(out))
        processes.run("answers", *command, limit_s=AUDIT_S)
        told = json.loads(out.read_bytes())
        figures = told["files"]["eval"]
        found["passages"], found["questions"] = told["passages"], figures["questions"]
        found[kind] = figures["top"][TOP]
    return found


def summary(found: dict[str, Any] | None) -> dict[str, Any]:
    """The figures by name; None where the files of the task are not made."""
    less = None
    if found:
        less = (found["tantivy"] - found["bm25"]) / found["questions"]
    return {"tantivy_top3_minus_bm25": less, "answers": found}


def table(found: dict[str, Any]) -> Table:
    """How many of the questions each ranker brings an answer for."""
    title = f"{found['questions']:,} questions to the {found['passages']:,} passages of make wiki"
    told = Table("ranker", f"an answer in the first {TOP}", "of all", title=title)
    for kind in RANKERS:
        told.add_row(kind, f"{found[kind]:,}", f"{found[kind] / found['questions']:.3f}")
    return told
