"""The verdict in a judge's reply. Pure."""

import re

_THOUGHT = re.compile(r"^.*</think>|<think>.*$", re.DOTALL)
_YES, _NO = ("yes", "true", "correct", "right"), ("no", "false", "incorrect", "wrong")
_WORD = rf"\b(?:{'|'.join((*_YES, *_NO))})\b"
# Neither 8/10, 1 out of ten, 1 of 5, 80% nor 1,000: only a number that stands for itself.
_ONE = r"\s*1(?:\.0)?(?![.,]?\d)"
_OF = rf"(?:/|out\s+of\b)(?!{_ONE})|(?:of|in)\b(?!{_ONE})\s*\d"
_DIGITS = r"(?:\d{1,3}(?:\.\d{1,20})?|\.\d{1,20})"
_NUMBER = rf"-?{_DIGITS}(?:e-?\d{{1,3}})?(?!\w|[.,]\d)(?!\s*(?:%|{_OF}))"
_SAID = rf"(?P<said>{_WORD}|{_NUMBER})"
_MARKS = r"[\s*_`'\"#:.!()\[\]{}-]*"
_ALONE = re.compile(rf"{_MARKS}?{_SAID}(?:\s*/\s*1(?:\.0)?(?!\d))?{_MARKS}", re.IGNORECASE)
# Not "answer": a judge quotes the accepted one, which may be a number, yes or no itself.
_NAMES = "verdict|judge?ment|decision", "score|rating|grade"
_NAMED = re.compile(
    rf"\b(?:{'|'.join(_NAMES)})\b[\s*_`'\":={{-]*(?:is\b)?"
    rf"[\s*_`'\":=-]*{_SAID}",
    re.IGNORECASE,
)
_KEYS = [
    re.compile(rf"(?<!\\)[\"'](?:{names})[\"']\s*:\s*[\"']?\s*", re.IGNORECASE) for names in _NAMES
]
_VALUE = re.compile(rf"{_SAID}(?=\s*[.!]?\s*(?:[\"',}}]|$))", re.IGNORECASE)
_OPENING = re.compile(
    r"[\s*_`'\"#]*\b(?P<said>yes|no)\b(?=\s*[*_`'\"]*\s*[.,;:!\n—–-]|\s*$)", re.IGNORECASE
)


def read_verdict(reply: str) -> float | None:
    """Parse a reply: yes is 1, no is 0, a number from 0 to 1 is itself; None for any other reply.

    A thought before the verdict is passed over. The verdict is the whole reply, else the last one
    that is named ("Score: 0.5"), else a yes or no that opens the reply, else its last line. Where a
    JSON object has a key for it (`{"verdict": "no"}`), that key's value and nothing else.
    """
    text = _THOUGHT.sub("", reply).strip()
    lines = text.splitlines()
    if keys := _keys(text):
        return _read(_VALUE.match(text, keys[-1].end()))
    named = list(_NAMED.finditer(text))
    return _read(
        _ALONE.fullmatch(text)
        or (named[-1] if named else None)
        or _OPENING.match(text)
        or (_ALONE.fullmatch(lines[-1]) if lines else None)
    )


def _keys(text: str) -> list[re.Match[str]]:
    """Find the keys of JSON objects that name a verdict, else those that name a score."""
    verdicts, scores = (list(key.finditer(text)) for key in _KEYS)
    return verdicts or scores


def _read(found: re.Match[str] | None) -> float | None:
    if found is None:
        return None
    said = found["said"].lower()
    if said in (*_YES, *_NO):
        return float(said in _YES)
    value = float(said)
    return value if 0.0 <= value <= 1.0 else None
