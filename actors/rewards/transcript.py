"""A finished rollout in words, for the parts of the reward, a user's own among them."""

import msgspec
import numpy as np

from replay.trajectory import Question, Search, StopReason, Turn
from retrieval_server.protocol import Passage


class Transcript(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """`texts` holds the policy's text of each turn, without end tokens, and `observations` the text
    after each: passages, a correction, or "" at the end.

    `answer` is the one that the environment took, None without one. `passages` were shown, in that
    order; of long ones the policy may have read a beginning only. `prompt` is the whole prompt with
    its special tokens. `turns` are the same in tokens, with searches and log-probs. `opened`: the
    environment had written the `<answer>` that the last turn closed.
    """

    question: Question
    answer: str | None
    stop_reason: StopReason
    prompt: str
    texts: tuple[str, ...]
    observations: tuple[str, ...]
    passages: tuple[Passage, ...]
    turns: tuple[Turn, ...]
    opened: bool = False

    @property
    def searches(self) -> tuple[Search, ...]:
        """Every search of the rollout, in order."""
        return tuple(search for turn in self.turns for search in turn.searches)


def made_up(question: Question) -> Transcript:
    """A rollout that searches once, finds a right answer (or what stands for one) and gives it; its
    tokens mean nothing.
    """
    answer = question.answers[0] if question.answers else "an answer"
    passage = Passage("made-up", f"Title\n{answer}", 1.0)
    search = Search(question.text, (passage.id,), 0.0, "ok")
    ids, numbers = np.ones(1, np.int32), np.zeros(1, np.float32)
    return Transcript(
        question=question,
        answer=answer,
        stop_reason=StopReason.ANSWERED,
        prompt=question.text,
        texts=(
            f"<think>I search.</think><search>{question.text}</search>",
            f"<think>I know.</think><answer>{answer}</answer>",
        ),
        observations=(f"<information>{passage.contents}</information>", ""),
        passages=(passage,),
        turns=(Turn(ids, numbers, ids, ids, (search,)), Turn(ids, numbers, ids, ids[:0])),
    )
