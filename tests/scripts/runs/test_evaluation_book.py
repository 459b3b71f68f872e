"""The result of an evaluation: what replay reckons, and what the audit does from the payloads."""

import random
from collections import deque

import msgspec
import pytest

from configs.rewards import EVALUATED
from replay.ledger.evaluation import Evaluation, summarise_evaluation
from replay.log.summary import Summary
from replay.trajectory import Question
from scripts.runs import evaluation_book
from scripts.runs.group_book import Group
from scripts.runs.record import facts


def test_the_audit_knows_every_part_that_evaluations_tell() -> None:
    assert facts.PARTS == EVALUATED


@pytest.mark.parametrize("seed", range(20))
def test_both_come_to_the_same(seed: int) -> None:
    chance, siblings = random.Random(seed), 1 + seed % 2
    sources = chance.sample(["nq", "hotpotqa", "", "lab/x"], chance.randint(1, 4))
    questions = [
        Question(f"q-{n}", "?", ("a",), n % 3, source=chance.choice(sources)) for n in range(12)
    ]
    evaluation = Evaluation(7, deque(), len(questions), siblings)
    groups = []
    for number, question in enumerate(chance.sample(questions, 9)):
        summaries = tuple(_summary(chance, number, n, question) for n in range(siblings))
        evaluation.answered[question.id] = summaries
        asked = facts.Question(question.id, question.hops, question.source)
        group = Group(number, "eval", asked, 0, 7, siblings)
        group.rollouts = {
            s.sibling: msgspec.convert(msgspec.to_builtins(s), facts.Summary) for s in summaries
        }
        groups.append(group)
    ours = summarise_evaluation(evaluation, questions)
    assert msgspec.to_builtins(evaluation_book.result_of(7, groups)) == msgspec.to_builtins(ours)
    claimed = msgspec.convert(msgspec.to_builtins(ours), facts.EvalResult)
    assert list(evaluation_book.differences(claimed, groups)) == []
    other = msgspec.structs.replace(claimed, parts={"judge": 9.0})
    assert [each[:6] for each in evaluation_book.differences(other, groups)] == ["parts:"]


def _summary(chance: random.Random, group: int, sibling: int, question: Question) -> Summary:
    return Summary(
        group_id=group,
        sibling=sibling,
        question_id=question.id,
        kind="eval",
        reward=chance.choice([None, 0.0, 1.0]),
        searches=chance.randint(0, 3),
        malformed=0,
        turns=1,
        action_tokens=3,
        oldest_version=chance.randint(0, 3),
        newest_version=chance.randint(3, 5),
        parts={name: chance.random() for name in EVALUATED if chance.random() < 0.95},
    )
