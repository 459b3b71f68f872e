"""The reason why a process of a run ended, in words, and whose end is to blame for the others'."""

import signal
from collections.abc import Mapping

from configs.runtime.process import Exit
from scripts.fleet.fleet import Fleet, Member


def cause_of(member: Member, code: int, why: str = "") -> str:
    """Say how a process ended and where its log is, and quote the end of that; `why`: it was ended
    by the launcher.
    """
    if member.seat.gone:
        return f"{member.name} has ended: {member.seat.gone}"
    if code == Exit.MADE_WAY:
        return f"{member.name} has saved its step and left"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"{member.name} {why or how} (log: {member.log_path})\n{member.last_words()}".rstrip()


def first_cause(fleet: Fleet, broken: Mapping[str, int]) -> str:
    """Say how the likeliest cause ended: a kill before a failure, consequences last."""
    name, code = min(broken.items(), key=blame)
    return cause_of(fleet.members[name], code)


def blame(ended: tuple[str, int]) -> tuple[int, str]:
    """Order ends by how likely each is the cause of the others."""
    name, code = ended
    last: dict[int, int] = {Exit.DONE: 2, Exit.CONSEQUENCE: 3}
    return last.get(code, code >= 0), name
