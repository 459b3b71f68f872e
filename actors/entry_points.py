"""Entry points: callables that the configuration names as `package.module:name`."""

import importlib
from collections.abc import Callable
from typing import Any

from configs.load import ConfigError


def load_entry_point(field: str, value: str) -> Callable[..., Any]:
    """Import the callable that `value` names. Raises ConfigError, naming the field."""
    module_name, _, name = value.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{field} = {value!r}: {module_name} cannot be imported: {type(error).__name__}: "
            f"{error}: install it in this environment, or add its folder to PYTHONPATH"
        ) from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ConfigError(f"{field} = {value!r}: {error}: name what that module holds") from error
    if not callable(found):
        raise ConfigError(f"{field} = {value!r}: a {type(found).__name__} cannot be called")
    return found  # type: ignore[no-any-return]
