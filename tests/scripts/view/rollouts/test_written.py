"""What was written is decoded by a table as the tokenizer itself does it."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from scripts.command.terminal import clean
from scripts.runs.show import load_tokenizer
from scripts.view.rollouts.written import MOST_WRITTEN, Written
from tests.scripts.view.conftest import HOSTILE, KEPT


@dataclass
class Turn:
    action_tokens: bytes


def turn(ids: list[int]) -> Turn:
    return Turn(np.array(ids, "<i4").tobytes())


@pytest.fixture
def tokenizer(bpe_tokenizer: Any, tmp_path: Path) -> Tokenizer:
    bpe_tokenizer.save_pretrained(tmp_path)
    return load_tokenizer(str(tmp_path))


def test_bytes_are_decoded_by_a_table(tokenizer: Tokenizer) -> None:
    written = Written(tokenizer)
    assert written._table is not None
    for text in ("kelu vora", HOSTILE, "été 東京 🙂 <|endoftext|>", ""):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert written.text([turn(ids)]) == clean(tokenizer.decode(ids, skip_special_tokens=False))
    assert written.text([turn([10**6, -5])]) == "" == written.text([Turn(b"abc")])


def test_the_beginning_of_all_turns_is_taken(tokenizer: Tokenizer) -> None:
    (ids,) = [tokenizer.encode("kelu vora ", add_special_tokens=False).ids]
    written = Written(tokenizer)
    assert written.text([turn(ids), turn(ids)]) == "kelu vora \nkelu vora "
    assert len(written.text([turn(ids * 9000)] * 3)) == MOST_WRITTEN


def test_each_token_has_its_piece(tokenizer: Tokenizer) -> None:
    """A character stands where its last token does, and together they are what is searched."""
    written = Written(tokenizer)
    number = {said: id for id, said in (written._table or {}).items()}
    ids = [number[bytes([each])] for each in b"a\xc3\xa9\x80\x80\xc3"]
    assert written.pieces(ids) == ["a", "", "é", "�", "�", "�"]
    assert written.pieces([10**6, -5]) == ["", ""] and written.pieces([]) == []
    for many in (ids * 3, tokenizer.encode(HOSTILE, add_special_tokens=False).ids):
        assert "".join(written.pieces(many)) == written.text([turn(many)])


@pytest.mark.parametrize("of_bytes", [True, False])
def test_what_is_no_text_is_told_at_once(of_bytes: bool) -> None:
    """What never completes a character is not decoded again with each further token."""
    letter = "\u0122" if of_bytes else "<0x80>"  # both stand for that byte
    words = Tokenizer(models.WordLevel({letter: 0, "a": 1}, "a"))
    words.decoder = decoders.ByteLevel() if of_bytes else decoders.ByteFallback()
    begun = time.process_time()
    found = Written(words).pieces([0] * 20_000)
    assert time.process_time() - begun < 1.0 and len(found) == 20_000
    assert "".join(found) == "�" * 20_000
    assert Written(words).pieces([1, 0, 0])[0] == "a"
    assert "".join(Written(words).pieces([1, 0, 0])) == "a��"


def test_other_tokenizers_decode_by_themselves() -> None:
    words = Tokenizer(models.WordLevel({"kelu": 0, "vora": 1, KEPT: 2}, "kelu"))
    assert Written(words).text([turn([0, 1])]) == "kelu vora"
    words.decoder = decoders.Metaspace()
    assert Written(words).text([turn([2]), turn([-1])]) == f"{KEPT}\n"
