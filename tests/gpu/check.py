"""A check on a GPU: its figures with what each should be, or why it was skipped. Standard library
alone: torch is looked for, never needed.
"""

import importlib.util
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


class Skipped(Exception):
    """A check cannot be made here; the message says what is missing."""


@dataclass(frozen=True)
class Figure:
    """A number as it is shown, and what it should be; `good` False fails the check, None only asks
    for a look.
    """

    name: str
    value: str
    should_be: str
    good: bool | None = True


@dataclass(frozen=True)
class Check:
    """`run` yields figures, or raises Skipped or whatever went wrong; `needs`: modules."""

    name: str
    run: Callable[[], Iterable[Figure]]
    needs: tuple[str, ...] = ("torch",)


def at_least(name: str, value: float, bound: float, unit: str = "") -> Figure:
    """A speed, which no machine fails by: below the bound it is worth a look."""
    should_be = f"at least {bound:g}{unit}"
    return Figure(name, f"{value:,.3g}{unit}", should_be, value >= bound or None)


def at_most(name: str, value: float, bound: float, unit: str = "") -> Figure:
    """An error or a cost that fails the check above the bound."""
    return Figure(name, f"{value:.3g}{unit}", f"at most {bound:g}{unit}", value <= bound)


def why_not(check: Check) -> str:
    """Say what keeps a check from being made here; '' where nothing does."""
    missing = [name for name in check.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    import torch

    return "" if torch.cuda.is_available() else "needs a GPU that torch can use"


def perform(checks: Sequence[Check], say: Callable[[str], None]) -> dict[str, dict[str, object]]:
    """Make every check and say how it went; by name: `outcome`, its cause, and the figures."""
    found: dict[str, dict[str, object]] = {}
    for check in checks:
        figures: list[Figure] = []
        outcome, cause = "skipped", why_not(check)
        if not cause:
            outcome, cause = _performed(check, figures)
        say(f"{outcome.upper():7} {check.name}{f': {cause}' if cause else ''}")
        for each in figures:
            mark = {True: " ", False: "!", None: "?"}[each.good]
            say(f"      {mark} {each.name}: {each.value}  (should be: {each.should_be})")
        shown = {each.name: {"value": each.value, "should_be": each.should_be} for each in figures}
        found[check.name] = {"outcome": outcome, "cause": cause, "figures": shown}
    return found


def _performed(check: Check, figures: list[Figure]) -> tuple[str, str]:
    try:
        figures += check.run()
    except Skipped as skipped:
        return "skipped", str(skipped)
    except Exception as error:  # noqa: BLE001 (the other checks go on)
        if type(error).__name__ == "OutOfMemoryError":
            return "skipped", "needs more memory than this GPU has free"
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "failed", f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    return ("failed", "see !") if any(each.good is False for each in figures) else ("passed", "")
