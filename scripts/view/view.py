"""A run's pages: overview, rollouts, health, timeline; from a server on the loopback, or in one
file.
"""

import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from configs.load import ConfigError
from configs.runtime.files import replacing, write_json
from configs.runtime.process import Exit
from replay.log.format import Segment, read_header
from replay.log.segments import opened, segments
from scripts.command.options import Options, argument, option
from scripts.command.terminal import clean, status
from scripts.runs.log import log_of, reading
from scripts.view.answers import state_and_damage
from scripts.view.check import browser, check
from scripts.view.export import page
from scripts.view.index import Index
from scripts.view.server import Following, Server, listener

_KEY_BYTES = 16
_NEWEST = 200  # rollouts in a file


@dataclass(frozen=True)
class ViewOptions(Options):
    runs: tuple[Path, ...] = argument("run directories, for example runs/latest")
    port: int = option("listen there on the loopback; 0: a free one", default=0, least=0)
    export: Path | None = option("write all pages into one file, and end", metavar="FILE.html")
    rollouts: int | None = option(
        f"with --export: so many of the newest, of each run alike ({_NEWEST} in all), and some of "
        "those that had sentinels fire",
        metavar="N",
        least=0,
    )
    check: bool = option(
        "open every page in a headless browser, say what was wrong, and end", default=False
    )
    json: Path | None = option("with --check: write what was found there", metavar="FILE")


def view(options: ViewOptions) -> int:
    """Serve the pages until interrupted, write them into a file, or check them: failed where they
    complain or ask elsewhere. Raises ConfigError, LogError, OSError.
    """
    _refuse(options)
    for run in options.runs:
        _require(run)
    runs = list(dict.fromkeys(run.resolve() for run in options.runs))  # `latest` may move on
    if options.export:
        most = _NEWEST if options.rollouts is None else options.rollouts
        _export(runs, options.export, most)
        return Exit.DONE
    if options.check:
        return _check(runs, options.json)
    with listener(options.port) as found, _index(runs) as index:
        following, key = Following(index), secrets.token_urlsafe(_KEY_BYTES)
        print(f"http://127.0.0.1:{found.getsockname()[1]}/{key}/", flush=True)
        print("the pages are there until Ctrl-C", file=sys.stderr)
        following.start()
        try:
            Server(index, following, key).run([found])
        except KeyboardInterrupt:
            pass
        finally:
            following.stop()
    return Exit.DONE


def _refuse(options: ViewOptions) -> None:
    """Raise ConfigError where options do not go together."""
    if options.rollouts is not None and not options.export:
        raise ConfigError(
            f"--rollouts {options.rollouts}: pages that are served show all rollouts: leave it "
            "out, or name a file with --export"
        )
    if options.check and options.export:
        raise ConfigError("--check --export: pages in a file are not checked: leave one out")
    if options.json and not options.check:
        raise ConfigError(
            f"--json {str(options.json)!r}: it is what --check finds: give that too, or leave it "
            "out"
        )


def _check(runs: Sequence[Path], file: Path | None) -> int:
    with browser() as opened, _index(runs) as index:
        _catch_up(index, runs)
        found = check(index, secrets.token_urlsafe(_KEY_BYTES), opened)
    _tell_damage(index)
    if file:
        write_json(file, found)
    for said in found["console_errors"]:
        print(f"view: {clean(said)}", file=sys.stderr)
    for address in found["foreign_requests"]:
        print(f"view: asked elsewhere: {clean(address)}", file=sys.stderr)
    wrong = len(found["console_errors"]) + len(found["foreign_requests"])
    paint = f", first paint {found['first_paint_s']} s" if found["pages"] else ""
    print(
        f"{len(found['pages'])} pages, {found['rows']:,} rollouts{paint}: "
        f"{wrong or 'no'} fault{'' if wrong == 1 else 's'}"
    )
    return Exit.FAILED if wrong else Exit.DONE


def _export(runs: Sequence[Path], file: Path, most: int) -> None:
    with _index(runs) as index:
        _catch_up(index, runs)
        text = page(index, most)
    _tell_damage(index)
    with replacing(file, durable=False) as draft:
        draft.write_text(text, encoding="utf-8")
    print(clean(str(file)))


def _catch_up(index: Index, runs: Sequence[Path]) -> None:
    """Read all logs to their ends, and show how far it is."""
    text = ", ".join(reading(log_of(run)) for run in runs)
    size = sum(part.path.stat().st_size for run in runs for part in segments(log_of(run)))

    def said() -> str:
        read = sum(told.follower.read for told in index.runs)
        return f"{text}: {100 * read // max(size, 1)} %"

    with status(said):
        index.catch_up(threading.Event())


def _tell_damage(index: Index) -> None:
    for told in index.runs:
        _, damage = state_and_damage(told)
        if damage:
            print(f"view: told up to here: {damage}", file=sys.stderr)
        if told.trouble:
            print(f"view: {clean(told.trouble)}", file=sys.stderr)


def _require(run: Path) -> None:
    """Raise ConfigError where there is no run, LogError where its log is of another format."""
    log = log_of(run)
    if log.exists():
        with opened(log) as file:
            read_header(Segment(log), file)


@contextmanager
def _index(runs: Sequence[Path]) -> Iterator[Index]:
    """An index in a file that is removed at the end, also by SIGTERM, or once the terminal is
    closed.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="forage-view-") as folder:
        index = Index(runs, Path(folder, "index.sqlite"))
        try:
            yield index
        finally:
            index.close()
