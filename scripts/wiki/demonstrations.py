"""Demonstrations by rule: what a question needs is looked up, hop by hop, and found.

Each search is a real one: its passages are what BM25 brings, in a random order, and what is needed
is among them. Rows are what `forage warm-start --demonstrations` reads.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any

from retrieval_server.protocol import Document
from scripts.wiki.questions import KINDS, Question
from scripts.wiki.reach import ranks

MOST = dict.fromkeys(KINDS, 30) | {"origin_fact": 250}


def demonstrations(
    questions: Iterable[Question], found: dict[str, list[Document]], seed: int
) -> list[dict[str, Any]]:
    """One row for each of the first questions of every kind whose searches bring what they need,
    in a random order.
    """
    chosen: dict[str, list[Question]] = {kind: [] for kind in KINDS}
    for question in questions:
        of_kind = chosen[question.kind]
        if len(of_kind) < MOST[question.kind] and all(ranks(question, found)):
            of_kind.append(question)
    rng = random.Random(f"demonstrations:{seed}")
    rows = [_row(each, found, rng) for of_kind in chosen.values() for each in of_kind]
    rng.shuffle(rows)
    return rows


def _row(
    question: Question, found: dict[str, list[Document]], rng: random.Random
) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for hop in question.hops:
        search = f"<think> {hop.thought} </think> <search> {hop.query} </search>"
        turns.append({"action": search, "passages": _shown(found[hop.query], rng)})
    answer = question.answers[0]
    written = f"<think> {question.conclusion} </think> <answer> {answer} </answer>"
    turns.append({"action": written})
    return {"id": question.id, "question": question.text, "turns": turns}


def _shown(passages: Sequence[Document], rng: random.Random) -> list[dict[str, str]]:
    order = rng.sample(passages, len(passages))
    return [{"id": str(each.id), "contents": each.contents} for each in order]
