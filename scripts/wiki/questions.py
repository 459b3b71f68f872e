"""A question with its way through the corpus, and the check that the corpus leads along it. A leaf
module but for articles and countries.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from actors.answers import normalize_answer

READ_WORDS = 60  # of a passage, from its title on: what is looked for stands among them
KINDS = {  # and how many hops it takes
    "definition": 1, "lifetime": 1, "year": 1, "origin": 1, "country": 1, "maker": 1,
    "origin_fact": 2, "maker_year": 2, "maker_origin": 2, "older": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Hop:
    """A search. `passage`: the id of what it is to bring; `finds`: what is read there; `thought`:
    what is said before it.
    """

    query: str
    passage: str
    finds: tuple[str, ...]
    thought: str


@dataclass(frozen=True)
class Question:
    """`about`: ids of articles and codes of countries; `conclusion`: said before the answer."""

    kind: str
    text: str
    answers: tuple[str, ...]
    hops: tuple[Hop, ...]
    conclusion: str
    about: frozenset[str]

    @property
    def id(self) -> str:
        """The same text has the same id, whatever else is asked."""
        return f"{self.kind}-{hashlib.blake2b(self.text.encode(), digest_size=5).hexdigest()}"

    @property
    def support(self) -> list[str]:
        """The ids of the passages that hold its facts, in their order."""
        return [hop.passage for hop in self.hops]


def stands(question: Question, corpus: Mapping[str, str]) -> bool:
    """True where each passage says what is to be found in it, soon enough to be read, and the
    question does not give its answer away.
    """
    asked, secret = _bare(question.text), set(question.answers)
    if KINDS[question.kind] > 1:
        secret = {each for hop in question.hops for each in hop.finds}
    if any(_bare(each) in asked for each in secret):
        return False
    return all(
        any(_bare(each) in _begin(corpus.get(hop.passage, "")) for each in hop.finds)
        for hop in question.hops
    )


def _begin(contents: str) -> str:
    return _bare(" ".join(contents.split()[:READ_WORDS]))


def _bare(text: str) -> str:
    """Normalised as rewards do it, with a space at each end: only whole words are found."""
    for dash in "–—-":
        text = text.replace(dash, " ")
    return f" {normalize_answer(text)} "
