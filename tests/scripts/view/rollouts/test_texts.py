"""Texts are found wherever they lie in the file, as they come."""

from pathlib import Path

import pytest

from scripts.view.rollouts import texts
from scripts.view.rollouts.texts import Texts


def found(held: Texts, words: str) -> list[int]:
    return [number for number, mark in enumerate(held.holding(words), 1) if mark]


@pytest.mark.parametrize("block", [16, 17, 64, 1 << 20])
def test_texts_are_found_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(texts, "BLOCK", block)
    held = Texts(tmp_path / "x.texts")
    assert found(held, "a") == []
    said = ["Anna sings", "", "x" * 99 + "anna", "no\0body annan", "ann", "a é"]
    assert [held.add(each) for each in said] == [1, 2, 3, 4, 5, 6]
    assert found(held, "ANNA") == [1, 3, 4] and found(held, "É") == [6]
    assert found(held, "nobody") == [4] and found(held, "ann\0") == [] == found(held, "sings x")
    assert held.add("Anna again") == 7 and found(held, "anna") == [1, 3, 4, 7]
    held.close()


def test_what_was_found_is_kept_for_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Texts(tmp_path / "x.texts")
    held.add("anna")
    for words in "abcdefghij":
        held.holding(words)
    assert list(held._looks) == [each.encode() for each in "cdefghij"]
    held.close()
