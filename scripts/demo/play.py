"""Demonstrations and a sampler of the demo task, without the demo's processes.

Both use the token stream that the actors produce with configs/demo.yaml:
`question <search> … </search> <information> … </information> <think> … </think> <answer> …
</answer>`.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from learner.imitation import Segment
from scripts.demo.tokenizer import CORRECTION, IDS, decode, encode
from scripts.demo.world import RELATIONS, SYLLABLES, Chain, LexicalIndex

TOP_K, MAX_TURNS, MAX_ACTION_TOKENS = 3, 3, 20  # as in configs/demo.yaml
_ALL_RELATIONS = (*RELATIONS, *(relation for group in RELATIONS.values() for relation in group))


@dataclass(frozen=True)
class Habits:
    """The rates of a demonstrator's mistakes; all zero is a clean one."""

    guess: float = 0.0  # answers a made-up name without searching
    wrong_relation: float = 0.0  # searches for something else about the right name
    garbled: float = 0.0  # searches for the whole question, or for a bare name
    wrong_copy: float = 0.0  # takes the name from another passage
    skip_second: float = 0.0  # answers what the first search found


def observation(passages: Iterable[str]) -> list[int]:
    """The tokens of an information block."""
    return encode(f"<information> {' '.join(passages)} </information>")


def demonstrate(
    chain: Chain, index: LexicalIndex, habits: Habits, rng: random.Random
) -> list[Segment]:
    """One trajectory: after each search the relation and the name found are written down."""
    segments: list[Segment] = [(encode(chain.question), False)]
    if rng.random() < habits.guess:
        return [*segments, _answer("", _made_up_name(rng))]
    subject, thought = chain.facts[0].subject, ""
    for hop, fact in enumerate(chain.facts):
        if hop and rng.random() < habits.skip_second:
            break
        relation = fact.relation
        if rng.random() < habits.wrong_relation:
            relation = rng.choice(_ALL_RELATIONS)
        query = f"{relation} of {subject}"
        if rng.random() < habits.garbled:
            query = rng.choice([chain.topic, subject, f"{relation} of {_made_up_name(rng)}"])
        passages = index.retrieve(query, TOP_K, rng)
        segments.append((encode(f"{thought}<search> {query} </search>"), True))
        segments.append((observation(passages), False))
        subject = _read(passages, relation, subject, rng.random() < habits.wrong_copy, rng)
        thought = f"<think> {relation} {subject} </think> "
    return [*segments, _answer(thought, subject)]


def _read(
    passages: Sequence[str], relation: str, subject: str, carelessly: bool, rng: random.Random
) -> str:
    right = [p for p in passages if p.startswith(f"{subject} has {relation} ")]
    others = [p for p in passages if p not in right]
    choice = others if others and (carelessly or not right) else right
    return rng.choice(choice).split()[-2] if choice else _made_up_name(rng)


def _answer(thought: str, name: str) -> Segment:
    return encode(f"{thought}<answer> {name} </answer>"), True


def _made_up_name(rng: random.Random) -> str:
    return rng.choice(SYLLABLES) + rng.choice(SYLLABLES)


@dataclass
class Play:
    """One rollout in progress: its tokens, and the action of the turn so far."""

    chain: Chain
    tokens: list[int] = field(default_factory=list)
    action: list[int] = field(default_factory=list)  # of the turn under way
    turns: int = 0
    searches: int = 0
    prediction: str | None = None
    done: bool = False

    def __post_init__(self) -> None:
        self.tokens += encode(self.chain.question)

    def take(self, token: int, index: LexicalIndex, rng: random.Random) -> None:
        """Add a sampled token; when it ends the turn, act."""
        self.tokens.append(token)
        self.action.append(token)
        if token in (IDS["</search>"], IDS["</answer>"]) or len(self.action) == MAX_ACTION_TOKENS:
            self._act(decode(self.action).split(), index, rng)
            self.action = []

    def _act(self, words: list[str], index: LexicalIndex, rng: random.Random) -> None:
        self.turns += 1
        openings = [n for n, word in enumerate(words) if word in ("<search>", "<answer>")]
        words = words[openings[0] :] if openings else []
        kind, inside = (words[0], words[1:-1]) if len(words) > 2 else ("", [])
        if kind == "<answer>" and words[-1] == "</answer>":
            self.prediction, self.done = " ".join(inside), True
        elif self.turns > MAX_TURNS:
            self.done = True
        elif kind == "<search>" and words[-1] == "</search>":
            self.searches += 1
            self.tokens += observation(index.retrieve(" ".join(inside), TOP_K, rng))
        else:
            self.tokens += encode(CORRECTION)


@torch.no_grad()  # type: ignore[untyped-decorator]
def play(
    model: PreTrainedModel,
    chains: Sequence[Chain],
    index: LexicalIndex,
    temperature: float,
    seed: int,
) -> list[Play]:
    """Sample all answers at once, a token of each row a forward, so that they need no padding."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    plays = [Play(chain) for chain in chains]
    active, cache, position = list(plays), DynamicCache(), 0
    while active:
        fed = torch.tensor([[row.tokens[position]] for row in active])
        logits = model(input_ids=fed, past_key_values=cache, use_cache=True).logits[:, -1]
        position += 1
        if temperature > 0:
            weights = torch.softmax(logits / temperature, -1)
            sampled = torch.multinomial(weights, 1, generator=generator)[:, 0].tolist()
        else:
            sampled = logits.argmax(-1).tolist()
        for row, token in zip(active, sampled, strict=True):
            if len(row.tokens) == position:
                row.take(token, index, rng)
        if any(row.done for row in active):
            kept = [number for number, row in enumerate(active) if not row.done]
            cache.batch_select_indices(torch.tensor(kept, dtype=torch.long))
            active = [active[number] for number in kept]
    return plays


def exact_match(plays: Sequence[Play], hops: int | None = None) -> float:
    """The fraction answered exactly, of all or of those with that many hops."""
    chosen = [row for row in plays if hops in (None, row.chain.hops)]
    return sum(row.prediction == row.chain.answer for row in chosen) / max(len(chosen), 1)
