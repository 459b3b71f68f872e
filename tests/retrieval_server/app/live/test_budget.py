"""Money: never more than there is, whoever asks at once; on the disk first; others count on."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from retrieval_server.app.live.budget import Budget, Spending
from retrieval_server.protocol import BadRecord


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "live" / "spending.jsonl"


def spent(path: Path) -> float:
    return sum(json.loads(line)["usd"] for line in path.read_text().splitlines())


def test_it_ends_with_what_the_rest_does_not_pay(path: Path) -> None:
    budget = Budget(path, 0.0035, 0.001)
    assert [budget.take() for _ in range(5)] == [True, True, True, False, False]
    assert budget.is_spent and budget.spent_usd == spent(path) == 0.003
    budget.give_back()
    assert not budget.is_spent and budget.take() and not budget.take()


def test_a_third_and_a_tenth_are_counted_exactly(path: Path) -> None:
    budget = Budget(path, 1.0, 0.1)
    assert sum(budget.take() for _ in range(12)) == 10


def test_another_process_counts_on(path: Path) -> None:
    first = Budget(path, 0.003, 0.001)
    assert first.take() and first.take()
    again = Budget(path, 0.003, 0.001)
    assert again.spent_usd == 0.002 and again.take()
    assert not first.take() and first.spent_usd == 0.003
    raised = Budget(path, 0.004, 0.001)
    assert raised.take() and not raised.take()


def test_several_at_once_spend_no_more_than_one_would(path: Path) -> None:
    budgets = [Budget(path, 0.02, 0.001) for _ in range(4)]

    def all_of(budget: Budget) -> int:
        return sum(budget.take() for _ in range(20))

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(all_of, budgets)) == 20
    assert spent(path) == pytest.approx(0.02)


def test_half_a_line_of_a_killed_process_is_dropped(path: Path) -> None:
    Budget(path, 1.0, 0.25).take()
    with path.open("ab") as file:
        file.write(b'{"at":1.0,"us')
    budget = Budget(path, 1.0, 0.25)
    assert budget.spent_usd == 0.25 and budget.take()
    assert spent(path) == 0.5


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_text('{"at":1,"usd":"much"}\n'),
        lambda path: path.write_text("\n"),
        lambda path: path.write_text('{"at":1,"usd":1e999}\n'),
        lambda path: path.write_text('{"at":1,"usd":1}\n{"at":2,"usd":-1.5}\n'),
        lambda path: path.mkdir(),
    ],
)
def test_what_is_no_account_is_refused(path: Path, harm: Callable[[Path], object]) -> None:
    path.parent.mkdir()
    harm(path)
    with pytest.raises(BadRecord, match=r"spending\.jsonl"):
        Budget(path, 1.0, 0.1)


def test_an_account_that_was_cut_short_pays_nothing(path: Path) -> None:
    budget = Budget(path, 1.0, 0.1)
    assert budget.take()
    path.write_text("")
    with pytest.raises(BadRecord, match="shorter"):
        budget.take()


def test_who_only_reads_counts_as_who_spends_and_changes_nothing(path: Path) -> None:
    seen = Spending(path)
    assert seen.look() == 0.0 and not path.exists() and not seen.is_spent(0.002, 0.001)
    budget = Budget(path, 0.002, 0.001)
    assert budget.take() and seen.look() == 0.001
    assert budget.take() and seen.look() == 0.002 and seen.is_spent(0.002, 0.001)
    budget.give_back()
    torn = path.read_bytes() + b'{"at":1,'
    path.write_bytes(torn)
    assert seen.look() == 0.001 and not seen.is_spent(0.002, 0.001) and path.read_bytes() == torn
    path.write_bytes(torn + b"\n")
    with pytest.raises(BadRecord, match="a line is wrong"):
        seen.look()
