"""Verification of a version by what its actors report, and by comparing them. Pure.

The bytes' digest says that they arrived, the probe that they answer as the learner does, within its
tolerance; only what the models themselves hold, compared, shows a load that went wrong by less.
An actor that did not verify gets the version anew; `REFITS` times in a row, then it is an error.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from weight_sync.protocol import Applied, VerificationFailed

log = logging.getLogger(__name__)

REFITS = 2


class Verification:
    """The state of all actors; `refits` counts versions that had to be sent anew."""

    def __init__(self) -> None:
        self.refits = 0
        self._in_a_row: dict[str, int] = {}
        self._unfit: dict[str, str] = {}  # who gets the version anew, and why
        self._version = -1
        self._checksums: dict[str, tuple[str, ...]] = {}  # of that version, by worker

    def failed(self, name: str, error: VerificationFailed) -> None:
        """An actor did not verify. Raises the error when sending anew did not help."""
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
        if self._in_a_row[name] > REFITS:
            raise error
        log.error("%s: sent again", error)
        self.refits += 1
        self._unfit[name] = str(error)

    def compare(self, applied: Sequence[Applied], version: int) -> None:
        """Note which of the actors applied another version, or hold other weights."""
        for each in applied:
            if each.policy_version != version:
                said = f"{each.actor_id} applied version {each.policy_version} for {version}"
                self.failed(each.actor_id, VerificationFailed(said))
        right = [each for each in applied if each.policy_version == version]
        said_by = {each.actor_id: each.weights_checksums for each in right}
        for name, words in self._differing(version, said_by).items():
            self.failed(name, VerificationFailed(words))
        for each in applied:
            if each.actor_id not in self._unfit:
                self._in_a_row.pop(each.actor_id, None)

    def late(self, applied: Applied) -> str:
        """What is wrong with what one has applied that came late, beside the others with the same
        version; ''. Its word is good again where nothing is.
        """
        name, wrong = applied.actor_id, ""
        if applied.policy_version == self._version:
            said = {name: applied.weights_checksums}
            wrong = self._differing(self._version, said).get(name, "")
        if not wrong:
            self._in_a_row.pop(name, None)
        return wrong

    def doubts(self, name: str) -> bool:
        """Return True if this actor's last version did not verify."""
        return name in self._in_a_row

    def unfit(self, names: Iterable[str]) -> dict[str, str]:
        """Take out those of `names` that get the version anew, with the reason for each."""
        return {name: self._unfit.pop(name) for name in names if name in self._unfit}

    def _differing(self, version: int, said: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        """Return who differs from more than half of the actors with as many workers, which alone
        hold the same shards; where there is no such half, all of those.
        """
        if version != self._version:
            self._version, self._checksums = version, {}
        self._checksums.update(said)
        differing: dict[str, str] = {}
        for workers in {len(value) for value in self._checksums.values()}:
            alike = {name: each for name, each in self._checksums.items() if len(each) == workers}
            differing |= _outvoted(version, alike)
        for name in differing:
            del self._checksums[name]
        return differing


def _outvoted(version: int, checksums: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Who does not hold what more than half of these hold, each with the words that say so."""
    if len(set(checksums.values())) <= 1:
        return {}
    ((commonest, count),) = Counter(checksums.values()).most_common(1)
    agreed = commonest if count * 2 > len(checksums) else None
    words = ", ".join(f"{name} {' '.join(each)}" for name, each in sorted(checksums.items()))
    wrong = [name for name, each in checksums.items() if each != agreed]
    return dict.fromkeys(wrong, f"version {version}: weights differ between actors: {words}")
