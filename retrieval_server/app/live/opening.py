"""Opening of live searches from a configuration, and the checks before.

What they cost is in `live/` of the run's folder, and so is the record, unless another file is
named. The key is read from a file of its owner's or from the environment, and kept in memory alone.
"""

import os
import re
from pathlib import Path

from configs.load import ConfigError
from configs.retrieval import LiveConfig, RetrievalConfig
from configs.schema import Config
from retrieval_server.app.live import budget as spending
from retrieval_server.app.live import record
from retrieval_server.app.live.budget import Budget, Spending
from retrieval_server.app.live.providers import PROVIDERS
from retrieval_server.app.live.record import Answers, Scope
from retrieval_server.app.live.search import LiveSearch
from retrieval_server.auth import read_token
from retrieval_server.protocol import BadRecord

FOLDER = "live"
_KEY = "retrieval.live.key_file"
_SAFE = re.compile(r"[!-~]{8,4096}")  # a shorter one could not be told from other text


def check(config: Config) -> None:
    """Raise ConfigError, naming field, value and remedy, where live searches cannot be opened."""
    asked = config.retrieval
    if not asked.live.needs_key:
        _replayed(asked).close()
        return
    read_key(asked.live)
    if config.run_dir and (path := _spending(config)).exists():
        _opened_budget(path, asked.live)
    if (asked.live.record or config.run_dir) and (path := _record(config)).exists():
        _opened(asked, path, writes=False).close()
    elif asked.live.record and not Path(asked.live.record).parent.is_dir():
        raise ConfigError(
            f"retrieval.live.record = {asked.live.record!r}: its folder does not exist: make it, "
            "or name another"
        )


def require_folder(config: Config) -> None:
    """Raise ConfigError where there is no folder to count in what is spent."""
    asked = config.retrieval
    if asked.is_live and asked.live.needs_key and not config.run_dir:
        raise ConfigError(
            f"run_dir = '': with retrieval.kind = {asked.kind!r} what is spent is counted in the "
            "run's folder: name one, run_dir=DIR"
        )


def open_live(config: Config) -> LiveSearch:
    """Make the live searches of a configuration, for `async with`. Raises ConfigError."""
    asked, live = config.retrieval, config.retrieval.live
    if not live.needs_key:
        return LiveSearch(_replayed(asked), None, None, live)
    require_folder(config)
    check(config)
    provider = PROVIDERS[asked.kind](live, read_key(live))
    budget = _opened_budget(_spending(config), live)
    return LiveSearch(_opened(asked, _record(config), writes=True), provider, budget, live)


def spending_of(config: Config) -> Spending:
    """What a run has spent, for who only reads it."""
    return Spending(_spending(config))


def read_key(live: LiveConfig) -> str:
    """The provider's key. Raises ConfigError, which holds nothing of it."""
    if live.key_file:
        key, field = read_token(live.key_file, _KEY, "write the provider's key into it"), _KEY
    elif live.key_variable:
        key, field = os.environ.get(live.key_variable, "").strip(), "retrieval.live.key_variable"
        if not key:
            raise ConfigError(
                f"{field} names no variable that is set here: export it where the command is "
                "started, or name a file, retrieval.live.key_file=FILE"
            )
    else:
        raise ConfigError(
            f"{_KEY} = '': the provider is shown a key: name a file of mode 0600 that holds it, or "
            "the environment variable, retrieval.live.key_variable=NAME"
        )
    if not _SAFE.fullmatch(key):
        raise ConfigError(
            f"{field}: what it names holds no key: 8 to 4096 characters without spaces are "
            "expected: give the provider's key"
        )
    return key


def _spending(config: Config) -> Path:
    return Path(config.run_dir) / FOLDER / spending.FILE


def _record(config: Config) -> Path:
    named = config.retrieval.live.record
    return Path(named) if named else Path(config.run_dir) / FOLDER / record.FILE


def _opened_budget(path: Path, live: LiveConfig) -> Budget:
    try:
        return Budget(path, live.budget_usd, live.price_usd)
    except BadRecord as error:
        raise ConfigError(f"retrieval.live.budget_usd = {live.budget_usd!r}: {error}") from error


def _replayed(asked: RetrievalConfig) -> Answers:
    answers = _opened(asked, Path(asked.live.replay), writes=False, field="replay")
    if not len(answers):
        answers.close()
        raise ConfigError(
            f"retrieval.live.replay = {asked.live.replay!r}: it holds no answer of retrieval.kind "
            f"= {asked.kind!r} with this engine_id, country and language: name the record of a run "
            "that asked so, RUN/live/answers.jsonl"
        )
    return answers


def _opened(asked: RetrievalConfig, path: Path, writes: bool, field: str = "record") -> Answers:
    live = asked.live
    scope = Scope(asked.kind, live.engine_id, live.country, live.language)
    try:
        return Answers(path, scope, writes)
    except BadRecord as error:
        raise ConfigError(
            f"retrieval.live.{field} = {str(path)!r}: {error}: name a file that can be read"
            f"{' and written' * writes}"
        ) from error
