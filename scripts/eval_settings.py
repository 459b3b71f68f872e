"""What an evaluation's numbers depend on: `OUT/settings.json`, written before its first row.

Consumes the configuration and the digest of the weights; produces a record that a later start of
the same command agrees with, and any other one is refused by. Sets, environments, their limit and
the number of samples may change: each rollout has a row, and a seed, of its own.
"""

from pathlib import Path
from typing import Any, Self

import msgspec

from configs.files import write_durably
from configs.load import ConfigError, leaves
from configs.schema import Config

FILE_NAME = "settings.json"
_SECTIONS = ("model", "questions", "retrieval", "actors", "environment")
# Where things lie or run, how long is waited, and what training alone reads.
_WITHOUT_EFFECT = {
    *("model.path", "questions.train", "questions.eval", "questions.eval_limit"),
    *("retrieval.host", "retrieval.port", "retrieval.token_file", "retrieval.timeout_s"),
    *("retrieval.retries", "retrieval.max_connections", "retrieval.cache_queries"),
    *("retrieval.max_waiting_queries", "retrieval.request_deadline_s"),
    *("retrieval.drain_notice_s", "retrieval.threads", "retrieval.map_index"),
    *("actors.count", "actors.rollouts_in_flight", "actors.temperature"),
    *("actors.kv_cache_bytes", "actors.starting_deadline_s", "actors.engine_deadline_s"),
    *("actors.rollout_deadline_s", "actors.drain_deadline_s"),
    "environment.name",  # a row says it
}


class Settings(msgspec.Struct, frozen=True):
    """`weights`: the digest of the model folder, which was at `model`; `values` by dotted name."""

    model: str
    weights: str
    values: dict[str, Any]

    @classmethod
    def of(cls, config: Config, weights: str, temperature: float, exact: bool) -> Self:
        """Those of an evaluation that begins now."""
        tree = msgspec.json.decode(msgspec.json.encode(config))  # lists and numbers as read again
        values = {
            name: value
            for name, value in leaves({key: tree.get(key, {}) for key in _SECTIONS})
            if name not in _WITHOUT_EFFECT
        }
        for field in ("corpus", "index"):
            values[f"retrieval.{field} (bytes)"] = _size(getattr(config.retrieval, field))
        values |= {"seed": config.seed, "--temperature": temperature, "--exact": exact}
        return cls(config.model.path, weights, values)

    def differences(self, other: Self) -> list[str]:
        """What `other`, which stands on record, has otherwise, field by field."""
        ours = self.values | {f"weights of {self.model}": self.weights}
        theirs = other.values | {f"weights of {self.model}": other.weights}
        return [
            f"{name} = {theirs.get(name)!r} there, {ours.get(name)!r} here"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]


def agree(folder: Path, settings: Settings) -> None:
    """Put the settings on record in the folder of an evaluation, making it where there is none.

    Raises ConfigError when others are on record there, or the folder is something else's or cannot
    be written.
    """
    try:
        _agree(folder, settings)
    except OSError as error:
        raise ConfigError(
            f"--out {str(folder)!r}: {error.strerror}: name a folder that can be written"
        ) from error


def _agree(folder: Path, settings: Settings) -> None:
    path = folder / FILE_NAME
    if path.exists():
        unequal = settings.differences(_read(path))
        if unequal:
            raise ConfigError(
                f"--out {str(folder)!r} holds another evaluation: {'; '.join(unequal)}: give back "
                "what it was begun with, or name another folder"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"--out {str(folder)!r} holds something else than an evaluation: name a new folder"
        )
    write_durably(path, msgspec.json.format(msgspec.json.encode(settings)) + b"\n")


def _read(path: Path) -> Settings:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path}: the settings of an evaluation cannot be read: {error}: name another --out"
        ) from error


def _size(given: str) -> int:
    """The bytes of a file, or of all in a folder; 0 where there is none."""
    path = Path(given)
    if not given or not path.exists():
        return 0
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())
