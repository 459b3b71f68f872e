"""Hints for mistaken names: they name what exists."""

from pathlib import Path

import pytest

from configs import hints
from configs.load import FIELDS, ConfigError, parse


def test_other_names_are_of_fields_that_exist_and_are_no_fields_themselves() -> None:
    assert set(hints._ELSEWHERE) <= set(FIELDS)
    names = [name for names in hints._ELSEWHERE.values() for name in names]
    assert len(names) == len(set(names)) and not set(names) & set(FIELDS)


@pytest.mark.parametrize("key", ["learning_rate", "wandb", "lora.rank", "max_new_tokens", "Seed"])
def test_a_hint_is_one_line_of_a_terminal(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse("", [f"{key}=1"], "test")
    assert len(str(raised.value).partition("): ")[2]) <= hints.LINE


def test_a_path_that_holds_a_word_of_what_is_missing_is_no_request_for_it() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'model\.path'"):
        parse("", ["model.pth=/models/lora-merged"], "test")


def test_a_path_is_found_below_a_folder_that_is_misspelt(tmp_path: Path) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    assert hints.near(tmp_path / "modles" / "small") == tmp_path / "models" / "small"
    assert hints.near(tmp_path / "models" / "smal") == tmp_path / "models" / "small"
    assert hints.near(tmp_path / "modles" / "large") is None
    assert hints.near(Path("/no/such/thing")) is None
