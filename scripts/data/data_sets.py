"""The seven question-answering data sets of Search-R1, their files and their hops; and others, by
the names of their files or on the Hub.

FlashRAG's layout (`RUC-NLPIR/FlashRAG_datasets`): `<set>/<split>.jsonl`, rows of id, question and
golden_answers; fetched from the Hugging Face Hub where no folder is named.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from configs import hints
from replay.question_files import QuestionsError, question_files
from scripts.setup import hub

REPOSITORY = "RUC-NLPIR/FlashRAG_datasets"
# Hops of a set's questions; 0: its ids say (MuSiQue's `2hop__…`), or nobody does.
HOPS = {
    "nq": 1, "triviaqa": 1, "popqa": 1,
    "hotpotqa": 2, "2wikimultihopqa": 2, "bamboogle": 2, "musique": 0,
}  # fmt: skip
TRAIN, EVAL = ("train",), ("test", "dev", "train")  # the first split that is there
_SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Source:
    """One file of questions; `known`: in FlashRAG's layout."""

    data_source: str
    split: str
    path: Path
    known: bool = False


def find(names: Iterable[str], splits: tuple[str, ...], folder: str) -> list[Source]:
    """Find the file of each name: a known set's, a file's, one on the Hub, or NAME= one of these
    two. Raises QuestionsError, ConfigError.
    """
    found: dict[str, Source] = {}
    for name in names:
        source = _find(name, splits, folder)
        if source.data_source in found:
            raise QuestionsError(
                f"two sets are named {source.data_source!r}: write NAME={source.path} for one of "
                "them, so that their ids differ"
            )
        found[source.data_source] = source
    return list(found.values())


def hops_of(source: str, id: str, told: int) -> int:
    """The number of facts that the question needs; 0: unknown."""
    head = id.partition("hop")[0]
    if told or source not in HOPS:
        return told
    return HOPS[source] or (int(head) if head.isdecimal() else 0)


def _find(name: str, splits: tuple[str, ...], folder: str) -> Source:
    if folder and Path(folder, name).is_dir():
        return _in_folder(name, splits, folder)
    called, value = _named(name)
    local, split = hub.questions_and_split(_option(splits), value)
    if local != value:
        return Source(called or re.split("[/:@]", value)[1], split, Path(local))
    own = Path(value)
    there = all(file.is_file() for file in question_files(own))
    if own.suffix or there:
        if not there:
            remedy = hints.did_you_mean(own) or f"name a file, or one of {_KNOWN}"
            raise QuestionsError(f"{name!r}: no file there: {remedy}")
        return Source(called or own.stem, splits[0], own)
    if folder:
        return _in_folder(name, splits, folder)
    if name not in HOPS:
        raise QuestionsError(
            f"{name!r} is no set we know: name a file, OWNER/NAME on the Hub, or one of {_KNOWN}"
        )
    return _download(name, splits)


def _named(given: str) -> tuple[str, str]:
    """The name that NAME=VALUE gives, '' where none is given, and the value."""
    called, separator, value = given.partition("=")
    if not separator or "/" in called or Path(given).exists():
        return "", given
    if not called:
        raise QuestionsError(f"{given!r} has no name before its '=': write NAME=FILE, or FILE")
    return called, value


def _in_folder(name: str, splits: tuple[str, ...], folder: str) -> Source:
    for split in splits:
        for path in (Path(folder, name, split).with_suffix(s) for s in _SUFFIXES):
            if path.is_file():
                return Source(name, split, path, known=True)
    wanted = " or ".join(f"{split}.jsonl" for split in splits)
    raise QuestionsError(f"{str(Path(folder, name))!r} holds no {wanted}: name another --from")


def _download(name: str, splits: tuple[str, ...]) -> Source:
    wanted = [f"{name}/{split}.jsonl" for split in splits]
    path = hub.data_file(_option(splits), REPOSITORY, wanted)
    return Source(name, path.stem, path, known=True)


def _option(splits: tuple[str, ...]) -> str:
    return "--train" if splits == TRAIN else "--eval"


_KNOWN = ", ".join(HOPS)
