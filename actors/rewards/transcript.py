"""A finished rollout in words, for the parts of the reward, a user's own among them."""

from collections.abc import Collection, Sequence
from itertools import chain

import msgspec
import numpy as np

from actors.prompt import Prompter
from replay.trajectory import Question, Search, StopReason, TokenSequence, Turn
from retrieval_server.protocol import Passage


class Stream(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One sequence of a rollout in words: `prompt`, whole, with its special tokens; `texts`, the
    policy's of each turn, without end tokens; `observations`, the text after each: passages, a
    correction, or "" at the end. `turns` are the same in tokens, with searches and log-probs.
    `name`: whose it is, where a rollout has several.
    """

    prompt: str
    texts: tuple[str, ...]
    observations: tuple[str, ...]
    turns: tuple[Turn, ...]
    name: str = ""

    @property
    def contexts(self) -> tuple[str, ...]:
        """What the policy had read last before each turn: the prompt, then observations."""
        return (self.prompt, *self.observations)[: len(self.texts)]


class Transcript(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """`sequences`: the rollout's streams of text. Most have one; a program may have several (a
    summary, a sub-agent). `prompt` is the first one's; `texts`, `observations` and `turns` are
    those of all, sequence after sequence.

    `answer` is the one that the environment took, None without one. `passages` were shown, in that
    order; of long ones the policy may have read a beginning only. `opened`: the environment had
    written the `<answer>` that the last turn closed.
    """

    question: Question
    answer: str | None
    stop_reason: StopReason
    sequences: tuple[Stream, ...]
    passages: tuple[Passage, ...]
    opened: bool = False

    @property
    def prompt(self) -> str:
        """The first sequence's prompt, with its special tokens."""
        return self.sequences[0].prompt

    @property
    def texts(self) -> tuple[str, ...]:
        """The policy's text of each turn, without end tokens."""
        return tuple(chain.from_iterable(each.texts for each in self.sequences))

    @property
    def observations(self) -> tuple[str, ...]:
        """The text after each turn; "" at a sequence's end."""
        return tuple(chain.from_iterable(each.observations for each in self.sequences))

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every turn in tokens, with searches and log-probs."""
        return tuple(chain.from_iterable(each.turns for each in self.sequences))

    @property
    def searches(self) -> tuple[Search, ...]:
        """Every search of the rollout, in order."""
        return tuple(search for turn in self.turns for search in turn.searches)


def in_words(
    sequences: Sequence[TokenSequence], prompter: Prompter, ends: Collection[int]
) -> tuple[Stream, ...]:
    """Decode the sequences of a rollout; `ends`: the tokens that end a completion."""
    return tuple(
        Stream(
            prompt=prompter.decode(each.prompt_tokens),
            texts=tuple(prompter.said(turn.action_tokens, ends) for turn in each.turns),
            observations=tuple(prompter.decode(turn.observation_tokens) for turn in each.turns),
            turns=each.turns,
            name=each.name,
        )
        for each in sequences
    )


def made_up(question: Question) -> Transcript:
    """A rollout that searches once, finds a right answer (or what stands for one) and gives it; its
    tokens mean nothing.
    """
    answer = question.answers[0] if question.answers else "an answer"
    passage = Passage("made-up", f"Title\n{answer}", 1.0)
    search = Search(question.text, (passage.id,), 0.0, "ok")
    ids, numbers = np.ones(1, np.int32), np.zeros(1, np.float32)
    only = Stream(
        prompt=question.text,
        texts=(
            f"<think>I search.</think><search>{question.text}</search>",
            f"<think>I know.</think><answer>{answer}</answer>",
        ),
        observations=(f"<information>{passage.contents}</information>", ""),
        turns=(Turn(ids, numbers, ids, ids, (search,)), Turn(ids, numbers, ids, ids[:0])),
    )
    return Transcript(
        question=question,
        answer=answer,
        stop_reason=StopReason.ANSWERED,
        sequences=(only,),
        passages=(passage,),
    )
