"""The parts of mode `strict` that need nothing but the rollout. Pure.

Each reads only the policy's own tokens and the actions taken on them: a tag in the prompt, in a
passage or in the corrective text, or one begun in a turn and closed in the next, is worth nothing
and costs nothing. Without an answer, as where the last turn is malformed, every part of the answer
is 0. Penalties are 0 or less.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from actors.answers import exact_match, normalize_answer, substring_match, token_f1
from actors.rewards.transcript import Transcript

Golds = Sequence[str]
_NO_ACTIONS = ("think", "information", "answer")
_CLOSING = re.compile(r"</(\w+)>\Z")
_EVASIVE = re.compile(
    r"((it|its|is|answer|still|currently|i|am|im) )*"
    r"(unknown|unclear|uncertain|undetermined|unspecified|undisclosed|unanswerable|unavailable|"
    r"none|nothing|nobody knows|na|null|idk|noanswer|no answer|no idea|cannot say|cant say|"
    r"not (yet |publicly |explicitly )?(sure|known|available|found|given|specified|mentioned|"
    r"stated|provided|certain|clear|applicable|enough (information|evidence|data|context)))"
    r"( at this time| here| yet)*"
    r"|.*\b(cannot|can not|cant|could not|couldnt|unable to|impossible to|not able to|not possible "
    r"to) (be )?(know|known|answer|answered|determine|determined|say|said|tell|told|find|found|"
    r"identify|identified|confirm|confirmed|verify|verified|provide|provided)\b.*"
    r"|.*\b(do not|dont|does not|doesnt|did not|didnt) (know|have (enough|sufficient|any|"
    r"information)|find|provide|specify|mention|say|state|contain)\b.*"
    r"|.*\b(insufficient |not enough |no (further |relevant |sufficient |specific |such |more )*)"
    r"(information|evidence|data|context|details|mention)\b.*"
)
_LONGEST_EVASION = 400  # characters; who writes more has answered something


def em(answer: str | None, golds: Golds) -> float:
    """Return 1 for an answer that equals a gold one, normalised as in Search-R1; else 0."""
    return 0.0 if answer is None else exact_match(answer, golds)


def substring(answer: str | None, golds: Golds) -> float:
    """Return 1 for an answer that holds a gold one (equals it, if that normalises to nothing)."""
    if answer is None:
        return 0.0
    return max(exact_match(answer, golds), substring_match(answer, _worded(golds)))


def f1(answer: str | None, golds: Golds) -> float:
    """Return the best F1, 0 to 1, of the words of the answer and a gold answer."""
    return 0.0 if answer is None else token_f1(answer, golds)


def avoidance(answer: str | None, golds: Golds) -> float:
    """Return −1 for no answer, an empty one, or one that only says that there is none; else 0.

    F1 alone is known to end in such answers (Search-R1++, arXiv 2602.19526). A right answer is
    never evasive, whatever its words.
    """
    said = answer or ""
    words = normalize_answer(said.replace("’", ""))
    if words and substring(said, golds):
        return 0.0
    evasive = len(words) <= _LONGEST_EVASION and _EVASIVE.fullmatch(words)
    return -1.0 if not words or evasive else 0.0


def in_form(transcript: Transcript) -> float:
    """Return 1 where every turn of every sequence is one thought and one kind of action, and the
    one that ended last a thought and an answer; else 0.

    This is v0.3's automaton, (think search information)* think answer with only white space
    between, on the policy's own text: the environment's blocks need no judgement, and one that the
    policy writes itself is out of form. An action is any pair of tags that the environment has
    acted on. Where the environment has opened the answer, the last turn is an answer without a
    thought. A `<think>` that a chat template wrote just before a turn opens its thought.
    """
    turns = [
        (_with_opening(context, text), turn)
        for each in transcript.sequences
        for context, text, turn in zip(each.contexts, each.texts, each.turns, strict=True)
    ]
    # Sequences may be written beside one another: of two that ended alike, the later one.
    (last, _) = turns.pop(max(range(len(turns)), key=lambda n: (turns[n][1].ended_at, n)))
    acted = all(not turn.malformed and _acts(text) for text, turn in turns)
    if transcript.opened:
        return float(acted and _blocks(f"<answer>{last}") == ["answer"])
    return float(acted and _blocks(last) == ["think", "answer"])


def retrieval_hit(transcript: Transcript) -> float:
    """Return 1 where a passage that was shown holds a gold answer, normalised; else 0."""
    golds = [normalize_answer(gold) for gold in _worded(transcript.question.answers)]
    texts = (normalize_answer(passage.contents) for passage in transcript.passages)
    return float(any(gold in text for text in texts for gold in golds))


def search_cost(transcript: Transcript) -> float:
    """Return −1 for each search, whatever it found."""
    return 0.0 - len(transcript.searches)


def given(transcript: Transcript) -> float:
    """Return what the environment gave for all turns together."""
    return sum((turn.reward for turn in transcript.turns), 0.0)


OF_ANSWER: Mapping[str, Callable[[str | None, Golds], float]] = {
    "em": em,
    "substring": substring,
    "f1": f1,
    "avoidance": avoidance,
}
OF_TRANSCRIPT: Mapping[str, Callable[[Transcript], float]] = {
    "format": in_form,
    "retrieval_hit": retrieval_hit,
    "search_cost": search_cost,
    "environment": given,
}


def _with_opening(context: str, text: str) -> str:
    return f"<think>{text}" if context.rstrip().endswith("<think>") else text


def _acts(text: str) -> bool:
    """True where a turn is a thought and an action, or several of one kind."""
    closing = _CLOSING.search(text.rstrip())
    if closing is None or closing[1] in _NO_ACTIONS:
        return False
    thought, *actions = _blocks(text, closing[1]) or [""]
    return thought == "think" and set(actions) == {closing[1]}


def _blocks(text: str, action: str = "search") -> list[str]:
    """Return the names of the closed blocks, white space between, that are the whole text."""
    pieces = _tags(action).split(text)  # text, tag, text, tag … text
    tags, between = pieces[1::2], pieces[::4]
    names = [tag[1:-1] for tag in tags[::2]]
    closed = tags[1::2] == [f"</{name}>" for name in names]
    return [] if any(map(str.strip, between)) or not closed else names


@lru_cache
def _tags(action: str) -> re.Pattern[str]:
    names = {*_NO_ACTIONS, "search", "tool_call", action}
    return re.compile(rf"(</?(?:{'|'.join(sorted(names))})>)")


def _worded(golds: Golds) -> list[str]:
    """Return the gold answers that do not normalise to nothing."""
    return [gold for gold in golds if normalize_answer(gold)]
