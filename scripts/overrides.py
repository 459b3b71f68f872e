"""Overrides on a command line, `a.b=c`: which words are such, and which fields they set."""

from collections.abc import Sequence

import yaml

from configs.load import leaves
from configs.schema import Config

SCALARS = ("seed", "run_dir", "keys")  # fields of no section


def is_override(word: str) -> bool:
    """Whether a word is an override where it may be a question or NAME=FILE just as well: it begins
    with a section and a dot, or is a field of no section; before `=` there is no white space.
    """
    name, separator, _ = word.partition("=")
    head, dot, _ = name.partition(".")
    known = head in Config.__struct_fields__ if dot else head in SCALARS
    return bool(separator) and known and not any(map(str.isspace, name))


def fields_of(overrides: Sequence[str]) -> set[str]:
    """The dotted names of the fields that they set, `a={b: c}` taken apart."""
    found: set[str] = set()
    for override in overrides:
        name, _, text = override.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:  # who applies it says so
            value = text
        found |= {field for field, _ in leaves({name.strip(): value})}
    return found


def without_section(overrides: Sequence[str], section: str) -> list[str]:
    """Those that set nothing in this section."""
    return [each for each in overrides if each.partition("=")[0].strip().split(".")[0] != section]
