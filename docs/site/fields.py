"""The page of every field of the configuration, made of the schema: types, defaults, comments."""

import ast
import inspect
import io
import json
import re
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

import msgspec

from configs.schema import Config
from configs.section import CHANGEABLE, Section

INTRODUCTION = """\
# Every field of the configuration

A configuration file holds the fields that differ from these defaults; `section.field=value` on a
command line overrides any of them ([the form](quickstart.md#3-check-index-audit)). An unknown key,
a wrong type or a value out of range is refused with its remedy before anything starts. A field
marked **†** may change in a run that goes on (`forage resume RUN section.field=value`).
`configs/base.yaml` takes other defaults, by the machine ([which](running.md#defaults-by-device)).
This page is made of `configs/schema.py` and its imports.
"""
_FOR_TOOLS = re.compile(r"# (fmt|noqa|type):?")
_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null"}


@dataclass(frozen=True)
class Row:
    """A field: its dotted name, its type and default in words, what is said of it."""

    name: str
    kind: str
    default: str
    words: str
    changeable: bool


def page(pages: Mapping[str, str]) -> str:
    """The page in Markdown; `pages`: those in which a field may be told of, by file name."""
    return "\n".join([INTRODUCTION, *_sections(Config, "", pages)]) + "\n"


def rows(section: type[Section] = Config, prefix: str = "") -> Iterator[Row]:
    """All fields, in the schema's order, those of inner sections among them."""
    own, inner = _divided(section, prefix)
    yield from own
    for name, kind in inner.items():
        yield from rows(kind, f"{name}.")


def comments(section: type[Section]) -> dict[str, str]:
    """What the source says of each field of a section: comments above it and on its lines."""
    told: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if kind is not Section and issubclass(kind, Section):
            told |= _comments(textwrap.dedent(inspect.getsource(kind)))
    return told


def _divided(section: type[Section], prefix: str) -> tuple[list[Row], dict[str, type[Section]]]:
    """The fields of a section that are values, and its inner sections by their dotted names."""
    told, own, inner = comments(section), [], {}
    for field in msgspec.structs.fields(section):
        name = f"{prefix}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, Section):
            inner[name] = field.type
        else:
            made = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            marks = typing.get_args(field.type)
            row = Row(name, _kind(field.type), _value(made), told[field.name], CHANGEABLE in marks)
            own.append(row)
    return own, inner


def _sections(section: type[Section], prefix: str, pages: Mapping[str, str]) -> Iterator[str]:
    own, inner = _divided(section, prefix)
    if prefix:
        name, level = prefix[:-1], "#" * (1 + prefix.count("."))
        yield f"{level} `{name}`\n\n{' '.join((inspect.getdoc(section) or '').split())}\n"
    else:
        yield "## At the top\n"
    if own:
        yield "| field | takes | default | what | more |\n|---|---|---|---|---|"
        yield "\n".join(_line(row, pages) for row in own) + "\n"
    for name, kind in inner.items():
        yield from _sections(kind, f"{name}.", pages)


def _line(row: Row, pages: Mapping[str, str]) -> str:
    alone = "." not in row.name  # a word like any other, but in code
    before, after = ("`", "[`=]") if alone else (r"(?<![\w.])", r"(?!\w|\.\w)")
    named = re.compile(f"{before}{re.escape(row.name)}{after}")
    more = [f"[{uri.removesuffix('.md')}]({uri})" for uri in pages if named.search(pages[uri])]
    mark = " †" if row.changeable else ""
    words = (row.kind, row.default, row.words)
    cells = (each.replace("|", "\\|").replace("<", "&lt;") for each in words)
    return f"| `{row.name}`{mark} | {' | '.join(cells)} | {', '.join(more)} |"


def _comments(source: str) -> dict[str, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    written = [t for t in tokens if t.type == tokenize.COMMENT]
    said = {t.start[0]: t for t in written if not _FOR_TOOLS.match(t.string)}
    whole = {line for line, t in said.items() if not t.line[: t.start[1]].strip()}
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    told = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in whole:
                first -= 1
            lines = range(first, (node.end_lineno or first) + 1)
            words = [said[line].string.lstrip("# ") for line in lines if line in said]
            told[node.target.id] = " ".join(words)
    return told


def _kind(kind: Any) -> str:
    """A type in words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        metas = (part for part in parts[1:] if isinstance(part, msgspec.Meta))
        bounds = " and ".join(said for meta in metas for said in _bounds(meta))
        return f"{_kind(parts[0])} {bounds}".strip()
    if origin is Literal:
        return ", ".join(f"`{each}`" if each != "" else "empty" for each in parts)
    if origin in (typing.Union, UnionType):
        return " or ".join(map(_kind, parts))
    if origin is tuple:
        return f"list of {_kind(parts[0])}"
    if origin is dict:
        return "`key: value` lines"
    if isinstance(kind, type) and issubclass(kind, Section):
        named = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(kind))
        return f"sections of {named}"
    return _NAMES[kind]


def _bounds(meta: msgspec.Meta) -> Iterator[str]:
    for sign, bound in (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt)):
        if bound is not None:
            yield f"{sign} {bound:,}"


def _value(value: Any) -> str:
    """A default as one writes it in YAML."""
    if value in ("", (), {}):
        return "empty"
    if isinstance(value, str):
        return f"`{value!r}`" if "\n" in value or len(value) > 24 else f"`{value}`"
    if isinstance(value, bool) or value is None:
        return f"`{json.dumps(value)}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"
