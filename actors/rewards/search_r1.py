"""Search-R1's score of a whole text (its environment: `actors/environments/search_r1.py`), bug by
bug, for comparison with its published numbers. Pure.

Source: PeterGriffinJin/Search-R1, verl/utils/reward_score/qa_em.py (v0.2) and qa_em_format.py
(v0.3); `tests/vectors/reward.json` holds their outputs. The text is prompt and response together,
tags of passages and of the prompt included: so a response without an answer is given the prompt's
example, "Beijing".
"""

import re
from collections.abc import Sequence

from actors.answers import exact_match, extract_answer, normalize_answer

_ASSISTANT = re.compile(r"<\|im_start\|>assistant\s*")
_INFORMATION = re.compile(r"<information>(.*?)</information>", re.DOTALL)
_TAGS = ("think", "search", "information", "answer")
_TAG = re.compile(rf"(</?(?:{'|'.join(_TAGS)})>)")
_NEXT = {
    ("start", "<think>"): "in_think",
    ("information", "<think>"): "in_think",
    ("in_think", "</think>"): "after_think",
    ("after_think", "<search>"): "in_search",
    ("in_search", "</search>"): "after_search",
    ("after_search", "<information>"): "in_information",
    ("in_information", "</information>"): "information",
    ("after_think", "<answer>"): "in_answer",
    ("in_answer", "</answer>"): "end",
}


def whole_text(prompt: str, completions: Sequence[str], observations: Sequence[str]) -> str:
    """Return the scored text: the decoded prompt, then each completion, cut as generation cuts it
    and without end tokens, with its observation.
    """
    turns = zip(completions, observations, strict=True)
    return prompt + "".join(_cut(said) + observation for said, observation in turns)


def score_em(text: str, gold: str | Sequence[str], format_score: float = 0.0) -> float:
    """Score by v0.2: 1 for the right answer, `format_score` for another, 0 for none."""
    answer = extract_answer(text, "search_r1")
    if answer is None:
        return 0.0
    return 1.0 if exact_match(answer, gold) else format_score


def score_format(
    text: str,
    gold: str | Sequence[str],
    *,
    structure: float = 0.2,
    final: float = 0.1,
    retrieval: float = 0.0,
) -> float:
    """Score by v0.3: 1 for the right answer in a valid sequence, 1 − `structure` in another;
    without it, `structure` for a valid sequence, and `retrieval` with it where a passage holds a
    gold answer; `final` for a wrong answer in another sequence.
    """
    valid = not format_fault(text)
    answer = extract_answer(text, "search_r1")
    if answer is not None and exact_match(answer, gold):
        return 1.0 if valid else 1.0 - structure
    if valid:
        return structure + (retrieval if retrieval_hit(text, gold) else 0.0)
    return final if answer is not None else 0.0


def retrieval_hit(text: str, gold: str | Sequence[str]) -> bool:
    """True where an information block, the prompt's included, holds a normalised answer."""
    golds = [normalize_answer(each) for each in ([gold] if isinstance(gold, str) else gold)]
    blocks = [normalize_answer(block) for block in _INFORMATION.findall(text)]
    return any(each in block for block in blocks for each in golds)


def format_fault(text: str) -> str:
    """Return the first deviation of the text after the assistant's marker from (think search
    information)* think answer, in the original's words; empty for a valid one.
    """
    marker = _ASSISTANT.search(text)
    if marker is None:
        return "Missing assistant marker"
    content = text[marker.end() :]
    for tag in _TAGS:
        opened, closed = content.count(f"<{tag}>"), content.count(f"</{tag}>")
        if opened != closed:
            return f"Mismatch in {tag} tags: {opened} opening vs {closed} closing tags"
    state = "start"
    for part in filter(str.strip, _TAG.split(content)):
        if _TAG.fullmatch(part):
            if (state, part) not in _NEXT:
                return f"Unexpected tag {part} in state {state}"
            state = _NEXT[state, part]
        elif state == "end":
            return "Unexpected content in state end"
        elif not state.startswith("in_"):
            return f"Unexpected content '{part.strip()}' between tags (state: {state})"
    return "" if state == "end" else f"Incomplete sequence, ended in state {state}"


def _cut(completion: str) -> str:
    """Cut after the first `</search>`, else after the first `</answer>`, else not at all."""
    for tag in ("</search>", "</answer>"):
        before, found, _ = completion.partition(tag)
        if found:
            return before + tag
    return completion
