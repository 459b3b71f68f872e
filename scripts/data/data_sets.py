"""The seven question-answering data sets of Search-R1: their files and their hops.

FlashRAG's layout (`RUC-NLPIR/FlashRAG_datasets`): `<set>/<split>.jsonl`, rows of id, question and
golden_answers; fetched from the Hugging Face Hub where no folder is named.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from replay.questions import QuestionsError
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
    """One file of questions."""

    data_source: str
    split: str
    path: Path


def find(names: Iterable[str], splits: tuple[str, ...], folder: str) -> list[Source]:
    """Find the file of each name: a known set's, FILE or NAME=FILE. Raises QuestionsError,
    ConfigError.
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
    own = Path(name)
    if own.suffix or own.is_file():
        called, separator, file = name.partition("=")
        if not separator or "/" in called or own.exists():
            called, file = own.stem, name
        if not called:
            raise QuestionsError(f"{name!r} has no name before its '=': write NAME=FILE, or FILE")
        if not Path(file).is_file():
            raise QuestionsError(f"{name!r} does not exist: name a file, or one of {_KNOWN}")
        return Source(called, splits[0], Path(file))
    if folder:
        for split in splits:
            for path in (Path(folder, name, split).with_suffix(s) for s in _SUFFIXES):
                if path.is_file():
                    return Source(name, split, path)
        wanted = " or ".join(f"{split}.jsonl" for split in splits)
        raise QuestionsError(f"{str(Path(folder, name))!r} holds no {wanted}: name another --from")
    if name not in HOPS:
        raise QuestionsError(f"{name!r} is no set we know: name a file, or one of {_KNOWN}")
    return _download(name, splits)


def _download(name: str, splits: tuple[str, ...]) -> Source:
    option = "--train" if splits == TRAIN else "--eval"
    path = hub.data_file(option, REPOSITORY, [f"{name}/{split}.jsonl" for split in splits])
    return Source(name, path.stem, path)


_KNOWN = ", ".join(HOPS)
