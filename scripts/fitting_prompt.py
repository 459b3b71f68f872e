"""The prompt of a run's questions, where they are asked under another environment than the run's.

Consumes the configuration to ask with and the one on record; produces the former with a prompt that
its environment can keep to. Runs of before `environment.name` recorded Search-R1's prompt in full,
which is the default of one environment alone.
"""

from collections.abc import Sequence

import msgspec

from configs.environment import EnvironmentConfig
from configs.load import ConfigError
from configs.prompts import SEARCH_R1_PROMPT
from configs.schema import Config
from scripts.overrides import fields_of

_OF_ONE_ENVIRONMENT = ("<search>", "<tool_call>", "{passages}")
_SHOWN = 60  # characters of a prompt


def with_fitting_prompt(config: Config, recorded: Config, overrides: Sequence[str]) -> Config:
    """`config`, which is `recorded` with `overrides` and an environment of its own.

    A prompt that the overrides set stays; Search-R1's own, spelt out, becomes each environment's
    own. Raises ConfigError for one that tells of searching as only the environment on record does.
    """
    prompt, name, own = config.questions.prompt, config.environment.name, recorded.environment
    if "questions.prompt" in fields_of(overrides):
        return config
    if prompt == SEARCH_R1_PROMPT and (name != own.name or own == EnvironmentConfig()):
        questions = msgspec.structs.replace(config.questions, prompt="")
        return msgspec.structs.replace(config, questions=questions)
    mark = next((each for each in _OF_ONE_ENVIRONMENT if each in prompt), "")
    if mark and name != own.name:
        shown = prompt if len(prompt) <= _SHOWN else f"{prompt[:_SHOWN]}…"
        raise ConfigError(
            f"questions.prompt = {shown!r}: it is for environment.name = {own.name!r} (it has "
            f"{mark}), and {name!r} would be prompted by it too: give questions.prompt= for each "
            "environment's own, or a prompt for all of them"
        )
    return config
