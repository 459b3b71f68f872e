"""Where a text may be cut so that the tokens before the cut stay those of the whole text.

A token never spans the place before a space that follows a visible character, nor the one after a
newline between two of them, as long as no entry of the vocabulary does. BPE, Unigram and word
pieces then tokenise both sides by themselves: a merge, or a piece of the best segmentation, across
the place would be such an entry. (Words are split there too: the usual patterns look no further
ahead than the character behind the cut, and see the end of the text as they see a space. Visible
are letters, digits and ASCII punctuation: some normalisers make spaces of other characters, of
newlines too where the vocabulary has none.)
"""

import re
from collections.abc import Iterable

_SPACES = " Ġ▁"  # as text, in byte-level vocabularies and in SentencePiece's
_NEWLINES = "\nĊ"
_WHITE = f"{_SPACES}{_NEWLINES}\r\tčĉ"
_ACROSS_SPACE = re.compile(f"[^{_WHITE}][{_SPACES}]")
_ACROSS_NEWLINE = re.compile(f"[{_NEWLINES}][^{_WHITE}]")
_BEFORE_SPACE = r"(?<=[\w!-~])(?= )"
_AFTER_NEWLINE = r"(?<=[\w!-~]\n)(?=[\w!-~])"


class Truncation:
    """The places at which texts may be cut under one vocabulary."""

    def __init__(self, vocabulary: Iterable[str]) -> None:
        """`vocabulary`: every entry as the tokenizer spells it, added tokens included."""
        entries = list(vocabulary)
        places = []
        if entries and not any(map(_ACROSS_SPACE.search, entries)):
            places.append(_BEFORE_SPACE)
        has_newline = not {"\n", "Ċ", "<0x0A>"}.isdisjoint(entries)
        if has_newline and not any(map(_ACROSS_NEWLINE.search, entries)):
            places.append(_AFTER_NEWLINE)
        self._places = re.compile("|".join(places)) if places else None

    def end(self, text: str, chars: int) -> int:
        """Return the first place at or behind `chars`; the text's end where there is none."""
        if self._places is None or chars >= len(text):
            return len(text)
        found = self._places.search(text, chars)
        return found.start() if found else len(text)
