"""Overrides on a command line, `a.b=c`, and the fields that they set."""

from collections.abc import Sequence
from typing import Any

import msgspec

from configs.load import ConfigError, leaves, read_override
from configs.schema import Config

SCALARS = ("seed", "run_dir", "keys")  # fields of no section


def is_override(word: str) -> bool:
    """True for `section.field=…`, or a field of no section; other words may be questions."""
    name, separator, _ = word.partition("=")
    head, dot, _ = name.partition(".")
    known = head in Config.__struct_fields__ if dot else head in SCALARS
    return bool(separator) and known and not any(map(str.isspace, name))


def get_field(section: Any, field: str) -> Any:
    """The value of a section's (dotted) field."""
    for name in field.split("."):
        section = getattr(section, name)
    return section


def with_field(section: Any, field: str, value: Any) -> Any:
    """A copy of a section whose (dotted) field is this."""
    name, _, rest = field.partition(".")
    new = with_field(getattr(section, name), rest, value) if rest else value
    return msgspec.structs.replace(section, **{name: new})


def fields_of(overrides: Sequence[str]) -> list[str]:
    """The dotted names of the fields that they set, `a={b: c}` taken apart."""
    found: list[str] = []
    for override in overrides:
        try:
            key, value = read_override(override)
        except ConfigError:  # who applies it says so
            key, value = override.partition("=")[0].strip(), ""
        found += [field for field, _ in leaves({key: value})]
    return found
