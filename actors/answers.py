"""Answers compared with gold answers, after Search-R1's normalisation. Pure.

Source: PeterGriffinJin/Search-R1, verl/utils/reward_score/qa_em.py; the F1 is ReCall's (its
multiset of words, as in SQuAD). `tests/vectors/reward.json` holds outputs of the originals. Unicode
quotes, dashes and accents survive; a gold answer that normalises to nothing matches a prediction
that does.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Literal

Mode = Literal["strict", "search_r1"]

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_CLOSED = {"yes", "no", "noanswer"}  # answers that nothing else overlaps with


def normalize_answer(text: str) -> str:
    """Lower-case; remove ASCII punctuation, then articles, then extra white space."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, gold: str | Sequence[str]) -> float:
    """Return 1.0 where the normalised prediction equals a normalised gold answer, else 0.0."""
    normalized = normalize_answer(prediction)
    return float(any(normalize_answer(answer) == normalized for answer in _golds(gold)))


def substring_match(prediction: str, gold: str | Sequence[str]) -> float:
    """Return 1.0 where the normalised prediction holds a normalised gold answer, letter by letter
    ("cat" is in "category", nothing is in everything), else 0.0.
    """
    normalized = normalize_answer(prediction)
    return float(any(normalize_answer(answer) in normalized for answer in _golds(gold)))


def token_f1(prediction: str, gold: str | Sequence[str]) -> float:
    """Return the best F1, 0 to 1, of the normalised words of the prediction and a gold answer, each
    word as often as it occurs. Yes, no and noanswer match themselves alone.
    """
    normalized = normalize_answer(prediction)
    return max((_f1(normalized, normalize_answer(answer)) for answer in _golds(gold)), default=0.0)


def extract_answer(text: str, mode: Mode = "strict") -> str | None:
    """Return the content of the last closed `<answer>` pair of `text`, stripped; None without one.

    `strict` wants the policy's own text, or one turn of it. `search_r1` wants prompt and response
    together, as its original did, and takes the first pair for the prompt's own example: one pair
    alone is no answer.
    """
    found: list[str] = _ANSWER.findall(text)
    if len(found) < (2 if mode == "search_r1" else 1):
        return None
    return found[-1].strip()


def _golds(gold: str | Sequence[str]) -> Sequence[str]:
    return [gold] if isinstance(gold, str) else gold


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and not _CLOSED.isdisjoint((prediction, gold)):
        return 0.0
    said, wanted = prediction.split(), gold.split()
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0
