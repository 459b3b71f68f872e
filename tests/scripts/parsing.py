"""The options that a command line gives a command."""

import importlib
from typing import Any, get_type_hints

import pytest

from configs.runtime.process import Exit
from scripts import cli


def parsed(command: str, *words: str) -> Any:
    """Parse the words of a command without calling it."""
    module, name = cli.COMMANDS[command].module, cli.COMMANDS[command].target.partition(":")[2]
    seen: list[Any] = []

    def keep(options: Any) -> None:
        seen.append(options)

    keep.__annotations__ = get_type_hints(cli.COMMANDS[command].function())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module(module), name, keep)
        assert cli.main([*command.split(), *words]) == Exit.DONE
    return seen[0]
