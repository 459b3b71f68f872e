"""The fields that no record decides: they run code, name a secret, spend money, or reach out of
this process.

A record is what somebody wrote down about a run: its `config.yaml`, its log, a checkpoint's
manifest, or what replay tells an actor that joins. Who opens another's run would run another's
program by it. So these fields come from the command line and from a configuration that its user
names; from a record only where the user says `--trust`, or where they hold what harms nobody.
"""

import ipaddress
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from configs.environment import BUILT_IN
from configs.load import ConfigError, field_of, leaves, marked, read_override
from configs.schema import Config
from configs.section import (
    HUB_DATA,
    HUB_MODEL,
    NAMES_SECRET,
    ONE_OR_MORE,
    REACHES_OUT,
    RUNS_CODE,
    SPENDS,
    WRITES_THERE,
)

FLAG = "--trust"
TRUSTING = "take from the run's record also what runs code, names secrets or reaches out"
# What a command takes from a record: sections, or fields of one.
LEARNING = ("model.trust_remote_code",)
ASKING = (*LEARNING, "environment", "retrieval")
EVALUATING = (*ASKING, "actors")
ACTING = (*EVALUATING, "rewards", "weight_sync")
_FROM_THE_HUB = "it is a name on the Hub, from where it would be fetched"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?(@[\w.-]+)?")
_PLAIN_TEXTS = ("kv_cache_dtype", "attention_backend")  # keys of an engine: one of a few words
_SHOWN = 200  # characters of a value


def _fields() -> dict[str, str]:
    """Each field that a record does not decide, and why."""
    of_hub = {field: _FROM_THE_HUB for mark in (HUB_MODEL, HUB_DATA) for field in marked(mark)}
    marks = (RUNS_CODE, NAMES_SECRET, REACHES_OUT, WRITES_THERE, SPENDS)
    return of_hub | {field: (mark.extra or {})["trust"] for mark in marks for field in marked(mark)}


FIELDS = _fields()
_DEFAULTS = dict(leaves(msgspec.to_builtins(Config())))


def require(
    config: Config,
    *,
    source: str,
    trust: bool,
    given: Collection[str] = (),
    of: Sequence[str] = (),
    settable: bool = True,
) -> None:
    """Raise ConfigError, a line a field, for each that a record of `source` sets to what may do
    harm. `given`: fields that the user has set in its place; `of`: those sections or fields alone,
    for who reads no others; `settable`: the command line may set them.
    """
    if trust:
        return
    lines = []
    for field, value in told(config, of):
        if field not in given:
            written = _written(field, value)
            own = f", or give it yourself, {field}=VALUE" * settable
            lines.append(
                f"{field} = {_shown(written)}: {source} says so, not you, and {FIELDS[field]}: add "
                f"{FLAG} to take all that it says{own}"
            )
    if lines:
        raise ConfigError("\n".join(lines))


def told(config: Config, of: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """The fields that a record does not decide, with their values, which are not harmless."""
    for field, value in leaves(msgspec.to_builtins(config)):
        read = not of or any(field == each or field.startswith(f"{each}.") for each in of)
        if field in FIELDS and read and not _is_harmless(field, value, config):
            yield field, value


def flag_for(config: Config) -> str:
    """` --trust`, where a command that goes on with a run of this configuration needs it; ''."""
    return f" {FLAG}" * any(told(config))


def require_inside(run: Path, *, trust: bool) -> None:
    """Raise ConfigError, a line a link, where one in a run's folder leads out of it: what is
    written below it, or removed there, would be something else of the user's.
    """
    if trust:
        return
    root, lines = Path(os.path.realpath(run)), []
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in sorted([*folders, *files])):
            there = os.path.realpath(path)  # of a loop of links, too
            if path.is_symlink() and not Path(there).is_relative_to(root):
                lines.append(
                    f"RUN = {_shown(str(run))}: {_shown(str(path.relative_to(root)))} is a link to "
                    f"{_shown(there)}, which would be written to: remove it, or add {FLAG} to "
                    "follow it"
                )
    if lines:
        raise ConfigError("\n".join(lines))


def given(overrides: Sequence[str]) -> set[str]:
    """The fields whose whole value these overrides of a command line say."""
    found = set[str]()
    for override in overrides:
        key, value = read_override(override)
        if field_of(key) == key:  # one key of an open field says nothing of its others
            found |= {name for name, _ in leaves({key: value})}
    return found


def _is_harmless(field: str, value: Any, config: Config) -> bool:
    if value in (_DEFAULTS[field], "", [], ()):
        return True
    match field:
        case "environment.name":
            return value in BUILT_IN
        case "retrieval.host":
            return bool(config.retrieval.url) or _is_loopback(value)
        case "actors.engine":
            return all(_is_plain(key, each) for key, each in value.items())
    if FIELDS[field] is _FROM_THE_HUB:
        return not _HUB_NAME.fullmatch(value) or Path(value).exists()
    return False


def _is_plain(key: str, value: Any) -> bool:
    """True for an engine's argument that names neither code nor a place."""
    number = value is None or isinstance(value, bool | int | float)
    word = key in _PLAIN_TEXTS and isinstance(value, str) and value.isidentifier()
    return (number or word) and "trust" not in key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _written(field: str, value: Any) -> Any:
    """A value as a user writes it: several as a list, and one alone where the field takes that."""
    if not isinstance(value, (list, tuple)):
        return value
    return value[0] if len(value) == 1 and field in marked(ONE_OR_MORE) else list(value)


def _shown(value: Any) -> str:
    text = repr(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
