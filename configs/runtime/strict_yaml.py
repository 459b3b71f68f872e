"""YAML as configurations are written: `1e-6` is a number, no key is given twice, and its size and
depth are bounded: a stranger's file is read too.
"""

import re
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from configs.runtime import libyaml

MOST_CHARS = 1_000_000
MOST_DEEP = 50  # lists and mappings in each other; libyaml's composer ends the process far deeper
MOST_VALUES = 100_000  # where each alias is written out


class Refused(ValueError):
    """YAML that is no configuration's, and why."""


class _Strict(SafeConstructor, Resolver):
    """Reads `1e-6` as a number and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse duplicate keys, which plain YAML silently overwrites."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise Refused(
                    f"key {name!r} is given twice (lines {lines[name]} and {line}): keep one"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


_Strict.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


class _Loader(_Strict, libyaml.SafeLoader):
    """What reads a configuration."""


class _Explainer(_Strict, yaml.SafeLoader):
    """The same, slower, and its complaints are those that have a remedy."""


def read(text: str) -> Any:
    """The value of a text. Raises YAMLError where it is no YAML, Refused."""
    if len(text) > MOST_CHARS:
        raise Refused(f"more than {MOST_CHARS:,} characters: no configuration is so long")
    try:
        return _read(text)
    except (yaml.YAMLError, Refused):
        raise
    except RecursionError as error:
        raise Refused(_too_deep()) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Refused(f"a value cannot be read ({error}): quote it where it is text") from error


def _read(text: str) -> Any:
    try:
        _refuse_excess(text)
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return yaml.load(text, _Explainer)


def _refuse_excess(text: str) -> None:
    """Raise Refused where a text is nested too deep, or its aliases make much of it: its events
    take no stack, and each is there once.
    """
    sizes, inside = dict[str, int](), list[tuple[str | None, int]]()  # values, by anchor
    for event in yaml.parse(text, libyaml.SafeLoader):
        anchor, size = getattr(event, "anchor", None), 1
        line = f"line {event.start_mark.line + 1}: " if event.start_mark else ""
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append((anchor, 1))
            if len(inside) > MOST_DEEP:
                raise Refused(f"{line}{_too_deep()}")
            continue
        if isinstance(event, yaml.AliasEvent):
            if anchor in [name for name, _ in inside]:
                raise Refused(f"{line}{anchor!r} contains itself: write it out")
            size = sizes.get(anchor or "", 1)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = inside.pop()
        if anchor:
            sizes[anchor] = size
        if inside:
            inside[-1] = inside[-1][0], inside[-1][1] + size
        if size > MOST_VALUES:
            raise Refused(f"{line}with its aliases more than {MOST_VALUES:,} values: write it out")


def _too_deep() -> str:
    return f"nested more than {MOST_DEEP} deep: no configuration is"
