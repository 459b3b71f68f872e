"""Overrides on a command line, `a.b=c`, and the fields that they set."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from configs import devices
from configs.load import ConfigError, field_of, leaves, read_override
from configs.schema import Config

_MISSPELT = re.compile(r"[A-Za-z_]\w*(\.\w+)+=\S*")  # a section that does not exist
SCALARS = ("seed", "run_dir", "keys")  # fields of no section


def is_override(word: str) -> bool:
    """True for `section.field=…`, or a field of no section; other words may be questions."""
    name, separator, _ = word.partition("=")
    head, dot, _ = name.partition(".")
    known = head in Config.__struct_fields__ if dot else head in SCALARS
    return bool(separator) and known and not any(map(str.isspace, name))


class QuestionsOrOverrides:
    """Words of a command that are questions, and fields to override: `words` is split."""

    words: tuple[str, ...]

    @property
    def overrides(self) -> list[str]:
        """The words that override fields, or are meant to."""
        return list(filter(_is_meant, self.words))

    @property
    def questions(self) -> list[str]:
        """The words that are questions."""
        return [word for word in self.words if not _is_meant(word)]


def _is_meant(word: str) -> bool:
    return is_override(word) or bool(_MISSPELT.fullmatch(word))


def get_field(section: Any, field: str) -> Any:
    """The value of a section's (dotted) field."""
    for name in field.split("."):
        section = getattr(section, name)
    return section


def with_field(section: Any, field: str, value: Any) -> Any:
    """A copy of a section whose (dotted) field is this."""
    return with_fields(section, {field: value})


def with_fields(section: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a section whose (dotted) fields are these, checked once all are set."""
    new, inner = dict[str, Any](), dict[str, dict[str, Any]]()
    for field, value in values.items():
        name, _, rest = field.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            new[name] = value
    new |= {name: with_fields(getattr(section, name), each) for name, each in inner.items()}
    return msgspec.structs.replace(section, **new)


def fields_of(overrides: Sequence[str]) -> list[str]:
    """The dotted names of the fields that they set, `a={b: c}` taken apart."""
    found: list[str] = []
    for override in overrides:
        try:
            key, value = read_override(override)
        except ConfigError:  # who applies it says so
            key, value = override.partition("=")[0].strip(), ""
        named = (field_of(name) for name, _ in leaves({key: value}))
        found += [field for field in named if field != devices.KEY]
    return found
