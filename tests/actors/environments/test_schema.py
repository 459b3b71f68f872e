"""JSON schemas from signatures, and arguments read by them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from actors.environments.schema import Arguments, WrongArguments
from configs.load import ConfigError
from tests.actors import faulty_tools, typed_tools
from tests.actors.calculator import calculator


def of(function: Callable[..., Any]) -> Arguments:
    return Arguments.of(function, "environment.tools = 'mine:f'")


def test_one_text_is_one_required_property() -> None:
    assert of(calculator).schema == {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }


def test_types_defaults_and_descriptions_are_told() -> None:
    schema = of(typed_tools.weather).schema
    assert schema["required"] == ["place"]
    assert schema["properties"]["days"] == {
        "type": "integer",
        "description": "how many",
        "default": 1,
    }
    assert schema["properties"]["unit"] == {"enum": ["C", "F"], "default": "C"}
    place = schema["properties"]["place"]
    assert place["type"] == "object" and place["required"] == ["city"]
    assert place["properties"]["city"] == {"type": "string"} and "$defs" not in schema


def test_arguments_are_read_by_their_types() -> None:
    read = of(typed_tools.weather).read({"place": {"city": "bore"}, "days": "3"})
    assert read == {"place": typed_tools.Place("bore"), "days": 3}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "missing required field `place`"),
        ({"place": {"city": 1}}, r"Expected `str`, got `int` - at `\$\.place\.city`"),
        ({"place": {"city": "bore"}, "unit": "K"}, "Invalid enum value 'K'"),
        ({"place": {"city": "bore"}, "more": 1}, "unknown field `more`"),
        ({"place": {"city": "\ud800"}}, "half a character"),
    ],
)
def test_wrong_arguments_are_named(given: Any, complaint: str) -> None:
    with pytest.raises(WrongArguments, match=complaint):
        of(typed_tools.weather).read(given)


@pytest.mark.parametrize("told", ["AssertionError: no such city", "SystemExit: no such city"])
def test_a_type_that_refuses_its_values_is_the_policys_fault(told: str) -> None:
    fault = {"AssertionError": AssertionError, "SystemExit": SystemExit}[told.partition(":")[0]]

    @dataclass
    class Town:
        city: str

        def __post_init__(self) -> None:
            raise fault("no such city")

    def forecast(town: Town) -> str:
        """It knows the weather."""
        return town.city

    with pytest.raises(WrongArguments, match=told):
        Arguments.of(forecast, "forecast").read({"town": {"city": "Oslo"}})


@pytest.mark.parametrize(
    ("schema", "parameter"),
    [
        ({"properties": {"a": True}}, None),
        ({"properties": {"a": {"type": "string"}}, "required": None}, "a"),
        ({"properties": {"a": {"type": "string"}}, "required": [{}]}, None),
        ({"properties": None, "required": ["a"]}, None),
        ({"properties": {"a": {"type": "string"}, "b": True}, "required": ["a"]}, "a"),
    ],
)
def test_a_servers_schema_may_be_anything(schema: dict[str, Any], parameter: str | None) -> None:
    arguments = Arguments(schema)
    assert arguments.one_text == parameter
    assert arguments.read_text('{"a": "b"}')["a"] in ("b", '{"a": "b"}')


@pytest.mark.parametrize(
    ("function", "parameter"),
    [
        (calculator, "expression"),
        (typed_tools.note, "text"),
        (typed_tools.weather, None),
        (faulty_tools.two, None),
    ],
)
def test_a_tag_holds_the_one_text_that_must_be(
    function: Callable[..., Any], parameter: str | None
) -> None:
    assert of(function).one_text == parameter


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("untyped", "its parameter 'text' has no type"),
        ("many", r"its parameter 'texts' \(\*texts: str\) cannot be given by name"),
        ("positional", "its parameter 'text' .* cannot be given by name"),
        ("array", "no JSON schema"),
        ("missing", "no JSON schema: .*Nowhere"),
        ("recursive", "no JSON schema: Tree holds itself"),
    ],
)
def test_a_signature_without_a_schema_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"environment.tools = 'mine:f': .*{complaint}"):
        of(getattr(typed_tools, name))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"city": "Oslo", "days": 3}', {"city": "Oslo", "days": 3}),
        ("Oslo", {"city": "Oslo"}),
        ('{"town": "Oslo"}', {"city": '{"town": "Oslo"}'}),
    ],
)
def test_a_tag_may_hold_an_object_where_more_may_be_given(text: str, read: dict[str, Any]) -> None:
    def forecast(city: str, days: int = 1) -> str:
        """It knows the weather."""
        return city * days

    assert Arguments.of(forecast, "forecast").read_text(text) == read
