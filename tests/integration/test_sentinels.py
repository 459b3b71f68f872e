"""Runs that go wrong, each in its way, by the real command, and the sentinel that ends them."""

import json
from collections.abc import Callable

import pytest

from scripts.runs.books import Audit
from tests.integration.conftest import Run
from tests.learner.health.record import CONSTANT, FLAT, WAYS

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.soak("sentinels")]
STOPPED = 3
UNCORRECTED = ("learner.objective=reinforce", "learner.behaviour_weight=none")
AGED = ("replay.max_staleness=16", "weight_sync.publish_every=17", *CONSTANT, *FLAT)
FOUND_NOTHING = '{"id": "1", "contents": "\\"шар\\"\\nкруглый"}\n'  # no word of any question


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("way", "rule"),
    [
        ("guesses", "searches"),
        ("repeats", "repeated_queries"),
        ("searches", "truncation"),
        ("sameness", "entropy"),
        ("words", "truncation"),
    ],
)
def test_a_run_that_goes_wrong_is_stopped_by_the_rule_of_its_way(
    launch: Callable[..., Run], way: str, rule: str
) -> None:
    _stopped(launch(*WAYS[way].overrides, f"sentinels.{rule}=stop"), rule)


@pytest.mark.timeout(900)
def test_old_data_without_a_correction_is_noticed(launch: Callable[..., Run]) -> None:
    _stopped(launch(*UNCORRECTED, *AGED, "sentinels.ess=stop"), "ess")


@pytest.mark.timeout(900)
def test_a_corpus_without_a_word_of_the_questions_is_noticed(
    launch: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory
) -> None:
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    corpus.write_text(FOUND_NOTHING)
    # Any answer is paid: a run without any reward ends by itself, as soon as a rule can fire.
    run = launch(
        *WAYS["guesses"].overrides, f"retrieval.corpus={corpus}", "sentinels.empty_searches=stop"
    )
    _stopped(run, "empty_searches")


def _stopped(run: Run, rule: str) -> None:
    """Assert that a run was ended by a rule, in order."""
    assert run.wait(800) == STOPPED, "".join(run.lines) + run.logs()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["cause"].startswith(f"sentinel {rule} at step "), summary
    books = Audit()
    books.fold(run.run_dir / "events.log")
    assert books.faults == [] and run.leftovers(5.0) == []
