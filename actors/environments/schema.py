"""The arguments of a tool: their JSON schema, and how a call's are read by it.

A typed signature is enough: its parameters become the properties, `Annotated[int, "how many"]`
describes one, and msgspec's types (dataclasses, Literal, lists, unions) nest. Numbers that a policy
writes as texts are read as numbers.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, UnsetType

from actors.errors import recordable
from configs.load import ConfigError

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NAME = "Arguments"


class WrongArguments(Exception):
    """A call's arguments are not those that the tool takes: the policy's own fault."""


@dataclass(frozen=True, eq=False)
class Arguments:
    """`schema`: a JSON schema's object; `kind`: what reads arguments by it, None where the tool
    itself checks them.
    """

    schema: dict[str, Any]
    kind: type[msgspec.Struct] | None = None

    @classmethod
    def of(
        cls, function: Callable[..., Any], named: str, *, is_method: bool = False
    ) -> "Arguments":
        """Derive them from a signature, without its `self` where it `is_method`. Raises
        ConfigError, which begins with `named`.
        """
        fields, defaults = list[Any](), dict[str, Any]()
        for parameter in _parameters(function, named)[is_method:]:
            if parameter.kind not in _BY_NAME:
                raise ConfigError(
                    f"{named}: its parameter {parameter.name!r} ({parameter}) cannot be given by "
                    "name, as a call does: name each"
                )
            if parameter.annotation is parameter.empty:
                raise ConfigError(
                    f"{named}: its parameter {parameter.name!r} has no type, so that there is no "
                    f"schema to tell the policy: annotate it, {parameter.name}: str"
                )
            kind = _described(parameter.annotation)
            if parameter.default is parameter.empty:
                fields.append((parameter.name, kind))
            else:
                fields.append((parameter.name, kind | UnsetType, UNSET))
                defaults[parameter.name] = parameter.default
        try:
            struct = msgspec.defstruct(_NAME, fields, kw_only=True, forbid_unknown_fields=True)
            return cls(_schema(struct, defaults), struct)
        except (TypeError, ValueError) as error:
            why = str(error).splitlines()[-1]
            raise ConfigError(f"{named}: its types have no JSON schema: {why}") from error

    @property
    def one_text(self) -> str | None:
        """The parameter that a text alone is: the one that must be given, or the only one."""
        known, names = self._properties, self.schema.get("required")
        if not isinstance(names, list) or not names:
            names = list(known)
        if len(names) != 1 or not isinstance(name := names[0], str):
            return None
        kind = known.get(name)  # of a server's schema: anything, true among it
        return name if isinstance(kind, dict) and kind.get("type") == "string" else None

    @property
    def _properties(self) -> dict[str, Any]:
        known = self.schema.get("properties")
        return known if isinstance(known, dict) else {}

    def read(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments to call with. Raises WrongArguments."""
        try:
            msgspec.json.encode(given)  # refuses half a surrogate pair
        except (UnicodeEncodeError, RecursionError) as error:
            raise WrongArguments("half a character, or too deep") from error
        if self.kind is None:
            return dict(given)
        try:
            read = msgspec.convert(given, self.kind, strict=False)
        except msgspec.ValidationError as error:
            raise WrongArguments(recordable(str(error))) from error
        except (Exception, SystemExit) as error:  # of a user's type, as it is made
            raise WrongArguments(recordable(f"{type(error).__name__}: {error}")) from error
        names = self.kind.__struct_fields__
        values = {name: getattr(read, name) for name in names}
        return {name: value for name, value in values.items() if value is not UNSET}

    def read_text(self, text: str) -> dict[str, Any]:
        """Return the arguments that a text gives: a JSON object of them, or, where a text alone
        can be, the one text. Raises WrongArguments.
        """
        known, one = self._properties, self.one_text
        if one is not None and (len(known) == 1 or not self._is_object(text)):
            return self.read({one: text})
        try:
            given = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise WrongArguments(f"no JSON object: {error}") from error
        if not isinstance(given, dict):
            raise WrongArguments("no JSON object")
        return self.read(given)

    def _is_object(self, text: str) -> bool:
        """Whether it is a JSON object of known arguments."""
        try:
            given = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return False
        return isinstance(given, dict) and given.keys() <= self._properties.keys()


def _parameters(function: Callable[..., Any], named: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function, eval_str=True).parameters.values())
    except Exception as error:  # an annotation in quotes is a user's code
        raise ConfigError(f"{named}: its types have no JSON schema: {error}") from error


def _described(annotation: Any) -> Any:
    """Take a plain text beside a type as its description."""
    if get_origin(annotation) is not Annotated:
        return annotation
    kind, *beside = get_args(annotation)
    marks = (Meta(description=each) if isinstance(each, str) else each for each in beside)
    return Annotated[(kind, *marks)]


def _schema(struct: type[msgspec.Struct], defaults: Mapping[str, Any]) -> dict[str, Any]:
    _, parts = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    found: dict[str, Any] = parts.pop(_NAME)
    kept = {key: found[key] for key in ("type", "properties", "required")}
    schema: dict[str, Any] = _inlined(kept, parts)
    for name, default in defaults.items():
        try:
            schema["properties"][name]["default"] = msgspec.to_builtins(default)
        except TypeError:  # no JSON: the policy is told only that it may leave it out
            continue
    return schema


def _inlined(node: Any, parts: Mapping[str, Any], above: tuple[str, ...] = ()) -> Any:
    """Put each part in the place of its reference, which parsers of calls do not follow. Raises
    TypeError for a type that holds itself.
    """
    if isinstance(node, list):
        return [_inlined(each, parts, above) for each in node]
    if not isinstance(node, dict):
        return node
    whole = {key: _inlined(each, parts, above) for key, each in node.items() if key != "$ref"}
    if "$ref" not in node:
        return whole
    name = node["$ref"].removeprefix("#/$defs/")
    if name in above:
        raise TypeError(f"{name} holds itself")
    inlined: dict[str, Any] = _inlined(parts[name], parts, (*above, name))
    return inlined | whole
