"""The base of the configuration's sections, their types and marks. A leaf module."""

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
PositiveFloat = Annotated[float, Meta(gt=0.0)]
NonNegativeFloat = Annotated[float, Meta(ge=0.0)]

# Marks of a field that a resumed run need not keep: its user may change it, or it follows the
# machine.
CHANGEABLE = Meta(extra={"resume": "changeable"})
OF_THE_MACHINE = Meta(extra={"resume": "of the machine"})
# What a record of a run would have a command do here, so that it is taken from there only by a user
# who trusts that (configs/trust.py).
RUNS_CODE = Meta(extra={"trust": "it runs code"})
NAMES_SECRET = Meta(extra={"trust": "what that holds is read and shown to others"})
REACHES_OUT = Meta(extra={"trust": "it is listened at, or what leaves this process goes there"})
WRITES_THERE = Meta(extra={"trust": "it is written and removed there"})
SPENDS = Meta(extra={"trust": "money is spent by it"})
# A list of texts that may be given as one text.
ONE_OR_MORE = Meta(extra={"form": "one or more"})
# A word among which is `off`, which YAML reads as false.
FALSE_IS_OFF = Meta(extra={"form": "false is off"})
# A file or folder that a run reads: the launcher makes the path absolute.
INPUT_PATH = Meta(extra={"path": "input"})
InputPath = Annotated[str, INPUT_PATH]
# One that may be a name on the Hugging Face Hub instead: the launcher puts a path in its place.
HUB_MODEL = Meta(extra={"hub": "model"})
HUB_DATA = Meta(extra={"hub": "dataset"})
ModelPath = Annotated[InputPath, HUB_MODEL]
QuestionsPath = Annotated[InputPath, HUB_DATA]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A frozen section of the configuration; unknown keys are errors."""
