"""Exact match after Search-R1's normalisation. Pure.

Source: PeterGriffinJin/Search-R1, verl/utils/reward_score/qa_em.py; `tests/vectors/reward.json`
holds outputs of the original. Unicode quotes, dashes and accents survive; a gold answer that
normalises to nothing matches a prediction that does.
"""

import re
import string
from collections.abc import Sequence

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Lower case; ASCII punctuation, then articles, then extra white space removed."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, gold: str | Sequence[str]) -> float:
    """1.0 when the normalised prediction equals a normalised gold answer, else 0.0."""
    answers = [gold] if isinstance(gold, str) else gold
    normalized = normalize_answer(prediction)
    return float(any(normalize_answer(answer) == normalized for answer in answers))
