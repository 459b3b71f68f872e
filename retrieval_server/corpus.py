"""Corpus files → documents: JSONL of `{"id", "contents"}`, the title on the contents' first line.

Consumes a path; produces a list held in memory, in the file's order (the order that breaks ties);
waits for nothing but the disk.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from retrieval_server.protocol import CorpusError, Document

_SHAPE = 'write one JSON object per line: {"id": "…", "contents": "Title\\ntext"}'


class _Row(msgspec.Struct):
    """A corpus line before its values are checked; raw, so that errors can show them."""

    id: msgspec.Raw = msgspec.Raw()
    contents: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Row)


def load_corpus(path: str | Path) -> list[Document]:
    """Read and check every passage; blank lines are skipped, whole-number ids become strings.

    Raises CorpusError naming file, line, field, value and remedy.
    """
    path = Path(path)
    if not path.is_file():
        found = "is not a file" if path.exists() else "does not exist"
        raise CorpusError(f"{str(path)!r} {found}: name a JSONL file of passages")
    seen: dict[str, int] = {}
    documents: list[Document] = []
    for number, document in _documents(path):
        first = seen.setdefault(str(document.id), number)
        if first != number:
            raise CorpusError(
                f"{path}:{number}: id = {document.id!r}: already used on line {first}; "
                "give each passage its own id"
            )
        documents.append(document)
    if not documents:
        raise CorpusError(f"{str(path)!r} holds no passages: {_SHAPE}")
    return documents


def _documents(path: Path) -> Iterator[tuple[int, Document]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _document(line, f"{path}:{number}")


def _document(line: bytes, where: str) -> Document:
    try:
        row = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{where}: {_shown(line)} is not a passage ({error}): {_SHAPE}"
        ) from error
    return Document(id=_id(row.id, where), contents=_contents(row.contents, where))


def _id(raw: msgspec.Raw, where: str) -> str:
    value = _value(raw, "id", where)
    whole_number = isinstance(value, int) and not isinstance(value, bool)
    if not (whole_number or (isinstance(value, str) and value)):
        raise CorpusError(f"{where}: id = {_shown(raw)}: must be a non-empty string; {_SHAPE}")
    return str(value)


def _contents(raw: msgspec.Raw, where: str) -> str:
    value = _value(raw, "contents", where)
    if not isinstance(value, str) or not value.strip():
        raise CorpusError(
            f"{where}: contents = {_shown(raw)}: must be a non-empty string; {_SHAPE}"
        )
    return value


def _value(raw: msgspec.Raw, field: str, where: str) -> object:
    if not bytes(raw):
        raise CorpusError(f"{where}: field {field!r} is missing: {_SHAPE}")
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorpusError(f"{where}: {field} = {_shown(raw)}: {error}; {_SHAPE}") from error


def _shown(raw: bytes | msgspec.Raw, limit: int = 80) -> str:
    text = bytes(raw).decode(errors="replace").strip()
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
