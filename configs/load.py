"""YAML + `a.b=c` overrides → `Config`; every error names the field, the value and the remedy."""

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import msgspec
import yaml

from configs import devices, hints
from configs.runtime import libyaml, strict_yaml
from configs.runtime.files import write_durably
from configs.schema import Config
from configs.section import CHANGEABLE, FALSE_IS_OFF, OF_THE_MACHINE, ONE_OR_MORE, Section


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names field, value and remedy."""


# The field that a text in place of a whole section is meant for.
_MAIN = {
    "model": "path",
    "questions": "train",
    "environment": "name",
    "retrieval": "corpus",
    "rewards": "mode",
    "learner": "objective",
    "weight_sync": "transport",
}
_FORM = "see configs/base.yaml for its form"
_OF_YAML = {  # remedies for PyYAML's complaints
    "'\\t'": "indent with spaces",
    "mapping values are not allowed": f"write `key: value`, with a space after the colon; {_FORM}",
    "could not find expected ':'": f"write `key: value`, with a space after the colon; {_FORM}",
}


def load(path: str | Path, overrides: Sequence[str] = (), gpus: int | None = None) -> Config:
    """Read a YAML file of differences from the defaults, apply overrides, check, and return the
    run's config. `gpus`: with the defaults of a machine with so many, not of this one.

    Raises ConfigError on an unknown key (naming the nearest known one), a wrong type or a value out
    of range.
    """
    path = Path(path)
    if not path.is_file() or hints.is_of_another_kind(path):
        wrong = "is no YAML file" if path.is_file() else "does not exist"
        wrong = "is a folder" if path.is_dir() else wrong
        remedy = hints.configuration(path)
        raise ConfigError(f"configuration file {str(path)!r} {wrong}: {remedy}")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(strict_yaml.MOST_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        cause = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {cause}") from error
    return parse(text, overrides, str(path), gpus)


def parse(text: str, overrides: Sequence[str], source: str, gpus: int | None = None) -> Config:
    """`load`, of text that came from `source`."""
    try:
        tree = strict_yaml.read(text) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1})" if mark else ""
        cause = getattr(error, "problem", None) or "characters that YAML does not allow"
        remedy = next((said for part, said in _OF_YAML.items() if part in cause), _FORM)
        raise ConfigError(f"{source}: not valid YAML{place}: {cause}: {remedy}") from error
    except strict_yaml.Refused as error:
        raise ConfigError(f"{source}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected sections such as `model:`, got {tree!r}")
    for override in overrides:
        _override(tree, override)
    tree = _with_defaults(tree, gpus)
    _check_keys(tree, Config, "")
    _in_form(tree)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), tree)) from error
    _check_relations(config)
    return config


def save(config: Config, path: Path) -> None:
    """Write the whole resolved configuration, durably."""
    write_durably(path, dump(config))


def dump(config: Config) -> str:
    """The whole resolved configuration as YAML; `parse` reads it."""
    tree = msgspec.to_builtins(config)
    return yaml.dump(tree, Dumper=libyaml.SafeDumper, sort_keys=False, width=1000)


def marked(mark: msgspec.Meta, section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """The dotted names of the fields that carry a mark of the schema, in its order."""
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from marked(mark, field.type, f"{prefix}{field.name}.")
        elif mark in typing.get_args(field.type):
            yield f"{prefix}{field.name}"


def _open(section: type[Section] = Config, prefix: str = "") -> Iterator[str]:
    """The dotted names of the fields that are mappings whose keys the schema does not know."""
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from _open(field.type, f"{prefix}{field.name}.")
        elif any(
            typing.get_origin(of) is dict for of in (field.type, *typing.get_args(field.type))
        ):
            yield f"{prefix}{field.name}"


OPEN_FIELDS = tuple(_open())


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted names and values in a tree of sections; a mapping in an open field is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in OPEN_FIELDS:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def field_of(name: str) -> str:
    """The field that an override of this dotted name sets: of a key in an open field, that."""
    return next((each for each in OPEN_FIELDS if name.startswith(f"{each}.")), name)


FIELDS = tuple(field for field, _ in leaves(msgspec.to_builtins(Config())))
CHANGEABLE_FIELDS = tuple(marked(CHANGEABLE))
MAY_DIFFER = frozenset((*CHANGEABLE_FIELDS, *marked(OF_THE_MACHINE)))


def recorded_config(tree: object) -> Config:
    """The configuration that a log or a checkpoint holds. Raises ValueError."""
    return msgspec.convert(tree, Config)


def differences(recorded: Config, given: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted field → both values, of every field that a run must keep and `given` does not."""
    ours, theirs = (dict(leaves(msgspec.to_builtins(config))) for config in (given, recorded))
    return {
        field: (value, ours[field])
        for field, value in theirs.items()
        if field not in MAY_DIFFER and value != ours[field]
    }


def retrieval_urls(config: Config) -> tuple[str, ...]:
    """The base URLs of the retrieval servers. Raises ConfigError while the port is still open (0)
    of a server of the run's own.
    """
    if config.retrieval.url:
        return config.retrieval.url
    if not config.retrieval.port:
        raise ConfigError(
            "retrieval.port is 0: give a port or retrieval.url when starting processes by hand"
        )
    return (f"http://{config.retrieval.host}:{config.retrieval.port}",)


def read_override(override: str) -> tuple[str, Any]:
    """The dotted key and the value of `a.b=value`: YAML, but a field of text takes plain text as it
    stands, and one of several texts a single one. Raises ConfigError.
    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form a.b=value: {_form(override)}")
    key, text = key.strip(), text.strip()
    kind = _kind(key)
    if text and kind is str and text[0] not in "'\"" and text not in ("null", "~"):
        return key, text
    try:
        value = strict_yaml.read(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigError(
            f"override {override!r}: {text!r} is not a YAML value: quote it"
        ) from error
    except strict_yaml.Refused as error:
        raise ConfigError(f"override {override!r}: {error}") from error
    if kind == tuple[str, ...] and isinstance(value, str):
        value = [value] if value else []
    return key, value


def _form(override: str) -> str:
    """The remedy for a word that is no override."""
    head = re.match(r"[\w.]*", override)
    if head and head[0] in FIELDS:
        return f"write {head[0]}=VALUE, one word without spaces"
    if override.endswith((".yaml", ".yml")):
        return "one configuration is read; override its fields instead"
    return "write it as one word without spaces, such as learner.lr=1e-6"


def _override(tree: dict[str, Any], override: str) -> None:
    key, value = read_override(override)
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is not a section")
        node = child
    node[leaf] = value


def _with_defaults(tree: dict[str, Any], gpus: int | None) -> dict[str, Any]:
    """The tree on top of the defaults that its key `defaults` names."""
    if devices.KEY not in tree:
        return tree
    given = {key: value for key, value in tree.items() if key != devices.KEY}
    known, device = (devices.BY_DEVICE, *devices.DEVICES), tree[devices.KEY]
    if device not in known:
        raise ConfigError(f"{devices.KEY} = {device!r}: choose one of {', '.join(known)}")
    here = devices.gpus_here() if gpus is None else gpus
    chosen = devices.device_of(here) if device == devices.BY_DEVICE else device
    return _merged(devices.defaults_of(chosen, here, given), given)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    tree = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
        tree[key] = _merged(below[key], value) if both else value
        if value is None and isinstance(below.get(key), Mapping):  # an empty section
            tree[key] = below[key]
    return tree


def _check_keys(tree: dict[str, Any], section: type[Section], prefix: str) -> None:
    known = {field.name: field.type for field in msgspec.structs.fields(section)}
    for key, value in tree.items():
        if key not in known:
            hint = hints.field(str(key), value, known, prefix, FIELDS)
            raise ConfigError(f"unknown key {prefix + str(key)!r} (value {value!r}): {hint}")
        inner = known[key]
        if prefix + key in OPEN_FIELDS:
            tree[key] = {} if value is None else value
        elif isinstance(inner, type) and issubclass(inner, Section):
            if value is None:
                tree[key] = {}
            elif not isinstance(value, dict):
                raise ConfigError(
                    f"{prefix + key} = {value!r}: expected a section of `key: value` lines"
                    f"{_meant(key, value, inner)}"
                )
            else:
                _check_keys(value, inner, f"{prefix}{key}.")


def _in_form(tree: dict[str, Any]) -> None:
    """Make a list of a single text where several may be given, `off` of false where it may be."""
    for field in (*(lists := set(marked(ONE_OR_MORE))), *marked(FALSE_IS_OFF)):
        *sections, leaf = field.split(".")
        node: Any = tree
        for section in sections:
            node = node.get(section, {})
        if isinstance(value := node.get(leaf), str) and field in lists:
            node[leaf] = [value] if value else []
        elif value is False and field not in lists:
            node[leaf] = "off"


def _meant(key: str, value: Any, section: type[Section]) -> str:
    """What may be meant by a value in place of a whole section."""
    names = {field.name for field in msgspec.structs.fields(section)}
    head = str(value).partition(":")[0]
    if head in names and (spaced := hints.unspaced(str(value))):
        return f": {spaced}"
    return f": did you mean {key}.{_MAIN[key]}={value}?" if key in _MAIN else ""


def _explain(message: str, tree: dict[str, Any]) -> str:
    what, _, where = message.partition(" - at `$.")
    field = where.rstrip("`")
    listing, _, inner = field.partition("[")
    if inner and any(map(_is_section, typing.get_args(_kind(listing)))):  # its values may be keys
        return what if what.startswith(listing) else f"{field}: {what[:1].lower() + what[1:]}"
    value: Any = tree
    for part in field.split("."):
        value = value.get(part.split("[")[0]) if isinstance(value, dict) else value
    kind = _given(_kind(listing))
    if _is_section(kind):  # it names its own fields
        return what
    choices = ""
    if names := _names_in(kind):
        choices = f"; choose one of {', '.join(map(repr, names))}, or a number of bytes"
        choices += f": write {number}" if (number := hints.number_of_bytes(str(value))) else ""
    if inner and typing.get_origin(kind) is tuple:  # of a value in a list
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is typing.Literal:
        choices = f"; choose one of {', '.join(map(repr, typing.get_args(kind)))}"
    if field in OPEN_FIELDS:
        choices = f"; write a line `key: value` for each, or {field}.KEY=VALUE"
    if typing.get_origin(kind) is tuple and not isinstance(value, list):
        choices = f"; write a list, {field}=[{value!r}]"
    if field.endswith("_bytes") and (number := hints.number_of_bytes(str(value))):
        choices = f"; write {number}"
    return f"{field} = {value!r}: {what[:1].lower() + what[1:]}{choices}"


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _given(kind: Any) -> Any:
    """A type without the null that may stand for it."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    return parts[0] if len(parts) == 1 < len(typing.get_args(kind)) else kind


def _names_in(kind: Any) -> list[str]:
    """The names that a field takes which takes a number too; none of any other kind."""
    parts = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, UnionType) else ()
    literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
    return [name for part in literals if int in parts for name in typing.get_args(part)]


def _kind(field: str) -> Any:
    """The declared type of `section.field`."""
    kind: Any = Config
    for part in field.split("."):
        kind = typing.get_type_hints(kind).get(part) if isinstance(kind, type) else None
    return kind


def _check_relations(config: Config) -> None:
    sync, replay = config.weight_sync, config.replay
    if sync.publish_every > replay.max_staleness + 1:
        raise ConfigError(
            f"weight_sync.publish_every = {sync.publish_every!r} with replay.max_staleness = "
            f"{replay.max_staleness!r}: actors would wait for weights that are never published; "
            f"publish_every may be at most max_staleness + 1 = {replay.max_staleness + 1}"
        )
    slots = config.actors.rollouts_in_flight
    if 0 < slots < replay.group_size:
        raise ConfigError(
            f"actors.rollouts_in_flight = {slots!r} is less than replay.group_size = "
            f"{replay.group_size!r}: siblings are leased together to one actor; raise it to "
            f"{replay.group_size}, or leave it out"
        )
    if config.questions.prompt and "{question}" not in config.questions.prompt:
        raise ConfigError(
            f"questions.prompt = {config.questions.prompt!r}: it must contain {{question}}"
        )
