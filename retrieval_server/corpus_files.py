"""Rows of corpus files, one at a time: JSONL, plain or gzipped, and parquet.

A row is `{"id", "contents"}`, the title on the contents' first line (wiki-18's form). Documents
come checked, in the file's order, with the number of their line or row.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow
import pyarrow.parquet

from retrieval_server.protocol import CorpusError, Document

SHAPE = 'write one JSON object per line: {"id": "…", "contents": "Title\\ntext"}'
# What makes a corpus of rows of a title and a text.
_JOIN = (
    "python -c \"import json, sys; [print(json.dumps({'id': str(row.get('id', n)), 'contents': "
    "row['title'] + '\\n' + row['text']})) for n, row in enumerate(map(json.loads, "
    'sys.stdin))]" < CORPUS > new.jsonl'
)
_COLUMNS = ["id", "contents"]
_BATCH = 1024


class _Row(msgspec.Struct):
    """A corpus line before its values are checked; raw, so that errors can show them."""

    id: msgspec.Raw = msgspec.Raw()
    contents: msgspec.Raw = msgspec.Raw()


class _Titled(msgspec.Struct):
    """A line of another layout."""

    title: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Row)


def is_plain(path: Path) -> bool:
    """Return True if the file's lines can be read where they are."""
    return not is_parquet(path) and path.suffix != ".gz"


def is_parquet(path: Path) -> bool:
    """Return True for a parquet file, or a folder of them."""
    return path.suffix == ".parquet" or path.is_dir()


def files_of(path: Path) -> list[Path]:
    """The files that the corpus at `path` consists of. Raises CorpusError when there are none."""
    if path.is_dir() and (files := sorted(path.glob("*.parquet"))):
        return files
    if not path.is_file():
        found = "is not a file" if path.exists() else "does not exist"
        raise CorpusError(
            f"{str(path)!r} {found}: name a file of passages (JSONL, plain or .gz, or parquet) or "
            "a folder of parquet files"
        )
    return [path]


def rows(path: Path) -> Iterator[tuple[str, Document]]:
    """Place (`file:number`) and document of every row; blank lines are skipped, whole-number ids
    become strings.

    Raises CorpusError naming file, line, field, value and remedy.
    """
    files = files_of(path)
    if is_parquet(path):
        yield from _parquet(files)
        return
    for number, _, line in lines(path):
        where = f"{path}:{number}"
        yield where, document(line, where)


def lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset in bytes (of what is unpacked) and text of every line that is not blank."""
    offset = 0
    try:
        with path.open("rb") if is_plain(path) else gzip.open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, offset, line
                offset += len(line)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise CorpusError(f"{str(path)!r} cannot be unpacked ({error}): copy it again") from error


def document(line: bytes, where: str) -> Document:
    """The document of a line; errors name `where`."""
    try:
        row = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorpusError(f"{where}: {_shown(line)} is not a passage ({error}): {SHAPE}") from error
    if missing := [name for name in _COLUMNS if not bytes(getattr(row, name))]:
        raise CorpusError(f"{where}: {_lacks(missing, line)}")
    id = _id(_value(row.id, "id", where), where)
    return Document(id, _text(_value(row.contents, "contents", where), where))


def _lacks(missing: list[str], line: bytes) -> str:
    """What is wrong with a row that has not all fields, with the remedy."""
    names = " and ".join(map(repr, missing))
    told = f"field{'s' * (len(missing) > 1)} {names} {'are' if len(missing) > 1 else 'is'} missing"
    titled = msgspec.json.decode(line, type=_Titled)
    if bytes(titled.title) and bytes(titled.text):
        return f"{told}: {SHAPE}; 'title' and 'text' are not read as they are: {_JOIN}"
    return f"{told}: {SHAPE}"


def _parquet(files: list[Path]) -> Iterator[tuple[str, Document]]:
    for path in files:
        try:
            with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
                for number, (id, contents) in enumerate(_pairs(file, path), start=1):
                    where = f"{path}:{number}"
                    yield where, Document(_id(id, where), _text(contents, where))
        except pyarrow.ArrowException as error:
            raise CorpusError(f"{str(path)!r} is not parquet ({error}): copy it again") from error


def _pairs(file: pyarrow.parquet.ParquetFile, path: Path) -> Iterator[tuple[object, object]]:
    there = file.schema_arrow.names
    if missing := [name for name in _COLUMNS if name not in there]:
        raise CorpusError(
            f"{str(path)!r} has no column {' and no '.join(map(repr, missing))}, only "
            f"{', '.join(there)}: a corpus has {' and '.join(_COLUMNS)}"
        )
    for batch in file.iter_batches(_BATCH, columns=_COLUMNS):
        yield from zip(*(batch[name].to_pylist() for name in _COLUMNS), strict=True)


def _id(value: object, where: str) -> str:
    whole_number = isinstance(value, int) and not isinstance(value, bool)
    if not (whole_number or (isinstance(value, str) and value)):
        shown = _shown(msgspec.json.encode(value))
        raise CorpusError(f"{where}: id = {shown}: must be a non-empty string; {SHAPE}")
    return str(value)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        shown = _shown(msgspec.json.encode(value))
        raise CorpusError(f"{where}: contents = {shown}: must be a non-empty string; {SHAPE}")
    return value


def _value(raw: msgspec.Raw, field: str, where: str) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorpusError(f"{where}: {field} = {_shown(raw)}: {error}; {SHAPE}") from error


def _shown(raw: bytes | msgspec.Raw, limit: int = 80) -> str:
    text = bytes(raw).decode(errors="replace").strip()
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
