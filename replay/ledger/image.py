"""An image of the durable state: all of it as bytes, without the payloads, which the log has.

It takes the place of the fold of the records that it follows: a state that takes an image in, and
then what was recorded since, is the state that folded the whole log. It is as large as what stands
now (groups, leases, batches, the newest reports), however long the run.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, get_args, get_origin

import msgspec

from replay.ledger.counters import Counters
from replay.ledger.evaluation import Evaluation
from replay.ledger.groups import Failures, Group
from replay.ledger.newest import Newest
from replay.ledger.state import LedgerState
from replay.log.records import Sampled
from replay.protocol import EvalResult, LogError, StepReport
from replay.questions import Supply
from replay.trajectory import Kind


class BadImage(LogError):
    """Bytes that are no image of a state, or one that another program made."""


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of `LedgerState` that records change; `source`: the digest of its questions."""

    source: bytes
    latest: float  # when the newest record became true
    questions: Supply
    opened: dict[int, Group]
    ready: dict[int, Group]
    sampled: dict[int, Group]
    evaluating: dict[int, Group]
    dropped: dict[int, None]
    short: set[int]
    held: dict[str, set[tuple[int, int]]]
    failures: Failures
    batches: dict[int, Sampled]
    evaluations: dict[int, Evaluation]
    under_way: tuple[int, ...]
    unannounced: list[int]
    results: Newest[EvalResult]
    reports: Newest[StepReport]
    counters: Counters
    next_group_id: dict[Kind, int]
    incarnation: int
    learner: str
    last_sampled: int
    served: int
    committed: int
    catching_up: bool
    tokenizer_digest: str
    stop_cause: str
    recorded: str
    facts: int


_GROUPS = ("opened", "ready", "sampled", "evaluating")
_MADE = ("source", "latest", "questions", "under_way", *_GROUPS)  # all others are copied
_COPIED = tuple(name for name in Image.__struct_fields__ if name not in _MADE)


def image_of(state: LedgerState, latest: float) -> bytes:
    """Return the image of a state."""
    fields: dict[str, Any] = {name: getattr(state, name) for name in _COPIED}
    for name in _GROUPS:
        fields[name] = _without_payloads(getattr(state, name))
    image = Image(
        source=digest(state),
        latest=latest,
        questions=state.questions.supply,
        under_way=tuple(state.under_way),
        **fields,
    )
    return _ENCODER.encode(image)


def decoded(data: bytes) -> Image:
    """Decode an image. Raises BadImage."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadImage(f"no image of a ledger of this program: {error}") from error


def take_in(state: LedgerState, image: Image) -> None:
    """Make `state` what the image says. Raises LogError where that has other questions."""
    if image.source != digest(state):
        raise LogError(
            "the log is of other (or since changed) question files, or another seed: put back the "
            "run's own"
        )
    for name in (*_GROUPS, *_COPIED):
        setattr(state, name, getattr(image, name))
    state.questions.supply = image.questions
    state.under_way = {step: state.evaluations[step] for step in image.under_way}


def lacking(state: LedgerState) -> dict[int, tuple[Group, int]]:
    """Return the siblings whose payloads may be asked for and are not here, by record number."""
    return {
        number: (group, sibling)
        for place in (state.opened, state.ready, state.sampled)
        for group in place.values()
        for sibling, number in group.places.items()
        if sibling not in group.payloads
    }


def digest(state: LedgerState) -> bytes:
    """Return what tells these questions, in their order, from any others."""
    evaluated = hashlib.sha256()
    for question in state.eval_questions:
        evaluated.update(_ENCODER.encode(question))
    return evaluated.digest() + state.questions.digest


def _without_payloads(groups: dict[int, Group]) -> dict[int, Group]:
    return {group_id: group.without_payloads for group_id, group in groups.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return list(value)
    raise NotImplementedError(type(value))


def _whole(kind: Any, value: Iterable[Any]) -> Any:
    """Make what msgspec has no kind for: a counter, a queue."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Counter:
        return Counter(msgspec.convert(value, dict[arguments[0], int]))  # type: ignore[valid-type]
    if origin is deque:
        return deque(msgspec.convert(value, list[arguments[0]]))  # type: ignore[valid-type]
    raise NotImplementedError(kind)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(Image, dec_hook=_whole)
