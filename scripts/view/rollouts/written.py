"""What the policy wrote in a rollout, as text that can be searched."""

from codecs import getincrementaldecoder
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from scripts.command.terminal import clean
from scripts.view.rollouts.tokenizer import tokenizer_of

MOST_WAITING = 8  # tokens for the rest of a character: it has four bytes at most
MOST_WRITTEN = 20_000  # characters of a rollout, and tokens of it, that are searched


class Sampled(Protocol):
    """A turn as it travels."""

    action_tokens: bytes  # int32


class Written:
    """Decodes what policies wrote by one tokenizer; one of bytes by a table, which takes a quarter
    of the time.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = _table(tokenizer)

    def text(self, turns: Iterable[Sampled]) -> str:
        """Return the beginning of what was written in these turns."""
        parts, left = list[str](), MOST_WRITTEN
        for turn in turns:
            count = min(len(turn.action_tokens) // 4, left)
            parts.append(self._said(np.frombuffer(turn.action_tokens, "<i4", count).tolist()))
            left -= count
            if not left:
                break
        return "\n".join(parts)[:MOST_WRITTEN]

    def pieces(self, ids: list[int]) -> list[str]:
        """Return the text of each token; '' for one whose character the next ones complete."""
        if self._table is None:
            return self._streamed(ids)
        decoder, last = getincrementaldecoder("utf-8")("replace"), len(ids) - 1
        said = (self._table.get(id, b"") for id in ids)
        return [clean(decoder.decode(each, place == last)) for place, each in enumerate(said)]

    def _streamed(self, ids: list[int]) -> list[str]:
        found, waiting, stream = list[str](), list[int](), DecodeStream(skip_special_tokens=False)
        try:
            for place, id in enumerate(ids, 1):
                said = stream.step(self._tokenizer, id) or ""
                waiting = [] if said else [*waiting, id]
                if len(waiting) == MOST_WAITING or (waiting and place == len(ids)):  # no character
                    said = self._tokenizer.decode(waiting, skip_special_tokens=False)
                    waiting, stream = [], DecodeStream(skip_special_tokens=False)
                found.append(clean(said))
        except Exception:  # noqa: BLE001 - ids of another tokenizer, of which it raises what it likes
            return [self._said([id]) for id in ids]
        return found

    def _said(self, ids: list[int]) -> str:
        if self._table is None:
            try:
                return clean(self._tokenizer.decode(ids, skip_special_tokens=False))
            except Exception:  # noqa: BLE001 - of ids of another tokenizer it raises what it likes
                return ""
        try:
            found = b"".join(map(self._table.__getitem__, ids))
        except KeyError:
            found = b"".join(self._table.get(each, b"") for each in ids)
        text = found.decode("utf-8", "replace")
        return text if found.isascii() else clean(text)  # its pieces are clean


def written_of(run: Path) -> Written | None:
    """The texts of a run; None where its tokenizer cannot be read."""
    tokenizer, _ = tokenizer_of(run)
    return written_by(tokenizer) if tokenizer is not None else None


@lru_cache(16)
def written_by(tokenizer: Tokenizer) -> Written:
    """What a policy of this tokenizer wrote, as text."""
    return Written(tokenizer)


def _table(tokenizer: Tokenizer) -> dict[int, bytes] | None:
    """The bytes of each token, where the tokenizer's are bytes."""
    decoder = tokenizer.decoder
    if decoder is None or b'"ByteLevel"' not in decoder.__getstate__():
        return None
    letters, table = _letters(), dict[int, bytes]()
    for token, id in tokenizer.get_vocab(with_added_tokens=False).items():
        if letters.keys() >= set(token):
            table[id] = _plain(bytes(map(letters.__getitem__, token)))
        else:
            table[id] = _plain(token.encode("utf-8", "replace"))
    for id, added in tokenizer.get_added_tokens_decoder().items():
        table[id] = _plain(added.content.encode("utf-8", "replace"))
    return table


def _plain(raw: bytes) -> bytes:
    try:
        return clean(raw.decode()).encode()
    except UnicodeDecodeError:  # a part of a character
        return raw


def _letters() -> dict[str, int]:
    """The byte that each letter of a vocabulary of bytes stands for (GPT-2's)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
