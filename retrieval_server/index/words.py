"""The words of a text, as every index of words has them and every query.

A word is a run of letters, digits or underscores after NFKC and case folding. Nothing is stemmed
and no stop word is removed: made-up or lower-case names ("bore", "the who", "vitamin c") must stay
findable, and BM25 itself gives words that are everywhere next to no weight.
"""

import re
import unicodedata

_word = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text, in order."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return _word.findall(text.casefold())
