"""Rollouts of a step as text: of its first groups the best and the worst sibling."""

from collections.abc import Iterator, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.runtime.text import clean
from replay.codec import decode_trajectory
from replay.protocol import Batch
from replay.trajectory import TokenSequence, Trajectory

GROUPS = 2
HEAD_CHARS, TAIL_CHARS = 3000, 5000  # of a longer text what is shown


def samples(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The rollouts in Markdown, harmless and of bounded length."""
    return [_markdown(each, tokenizer) for group in batch.groups[:GROUPS] for each in _ends(group)]


def _ends(group: Sequence[bytes]) -> list[Trajectory]:
    """The sibling with the highest reward and, where it is another, that with the lowest."""
    siblings = sorted(map(decode_trajectory, group), key=lambda each: each.sibling)
    scored = [each for each in siblings if each.reward is not None] or siblings
    best, worst = (way(scored, key=lambda each: each.reward or 0.0) for way in (max, min))
    return [best] if best is worst or best.reward == worst.reward else [best, worst]


def _markdown(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> str:
    earned = "unscorable" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in trajectory.reward_parts.items())
    searches = sum(len(turn.searches) for turn in trajectory.turns)
    head = (
        f"group {trajectory.group_id}, sibling {trajectory.sibling}: {earned}"
        f"{f' ({parts})' if parts else ''}, {searches} searches, {trajectory.stop_reason.value}, "
        f"versions {trajectory.oldest_version} to {trajectory.newest_version}"
    )
    said = (line for sequence in trajectory.sequences for line in _lines(sequence, tokenizer))
    text = _bounded(clean("\n".join(said)))
    # An indented block is shown letter for letter: no tag, link or image of a text's works.
    block = "\n".join(f"    {line}" for line in text.split("\n"))
    return f"{_plain(head)}\n\n{block}"


def _lines(sequence: TokenSequence, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    def words(tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> str:
        return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    yield f"[prompt{f' of {sequence.name}' if sequence.name else ''}]"
    yield words(sequence.prompt_tokens)
    for turn in sequence.turns:
        yield "[policy]"
        yield words(turn.action_tokens)
        if len(turn.observation_tokens):
            yield "[correction]" if turn.malformed else "[observation]"
            yield words(turn.observation_tokens)


def _bounded(text: str) -> str:
    left_out = len(text) - HEAD_CHARS - TAIL_CHARS
    if left_out <= 0:
        return text
    return f"{text[:HEAD_CHARS]}\n[{left_out} characters left out]\n{text[-TAIL_CHARS:]}"


def _plain(text: str) -> str:
    """One line in which Markdown finds nothing to do."""
    return "".join(c if c.isalnum() or c in " .,:()-_" else " " for c in clean(text))
