"""Which answers a text holds, for very many answers at once. Pure.

Answer and text go through the reward's normalisation (`actors.reward`: lower case, no ASCII
punctuation, no articles) and are compared word by word: the words of an answer must follow one
another in the text, each of them whole. So "rome" is not in "romeo", nor in "rome’s"; accents and
letters count as they are, as they do for the reward. An answer of which nothing is left cannot be
found.
"""

from collections.abc import Iterable

from actors.reward import normalize_answer
from replay.trajectory import Question


class Answers:
    """The normalised answers of questions, to be looked for in one text after the other.

    A text costs a look-up for each of its words, and one for each length of the answers that begin
    with that word.
    """

    def __init__(self, questions: Iterable[Question]) -> None:
        self.of = [
            frozenset(filter(None, map(normalize_answer, question.answers)))
            for question in questions
        ]
        self._all = frozenset().union(*self.of)
        lengths: dict[str, set[int]] = {}
        for answer in self._all:
            first, *rest = answer.split()
            lengths.setdefault(first, set()).add(1 + len(rest))
        self._lengths = {first: tuple(sorted(each)) for first, each in lengths.items()}

    def found_in(self, text: str) -> set[str]:
        """The normalised answers that a text holds; `of[n]` are those of question n."""
        words = normalize_answer(text).split()
        found = set()
        for at, word in enumerate(words):
            for length in self._lengths.get(word, ()):
                answer = word if length == 1 else " ".join(words[at : at + length])
                if answer in self._all:
                    found.add(answer)
        return found
