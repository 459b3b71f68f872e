"""Overrides on a command line, `a.b=c`, and the fields that they set."""

from collections.abc import Sequence

import yaml

from configs.load import leaves
from configs.schema import Config

SCALARS = ("seed", "run_dir", "keys")  # fields of no section


def is_override(word: str) -> bool:
    """True for a word that begins with a section and a dot, or with a field of no section, and has
    no white space before `=`; any other may be a question or NAME=FILE just as well.
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
