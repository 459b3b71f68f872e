"""The manifest of an index folder: the server serves nothing that disagrees with it.

A folder of `forage index` holds `manifest.json` (written last: a folder without one is unfinished)
and the files it lists, each with size and digest.
"""

from pathlib import Path

import msgspec

from configs.runtime.files import write_json
from retrieval_server.corpus_files import files_of
from retrieval_server.digests import Mark, mark
from retrieval_server.encoder_settings import EncoderSettings
from retrieval_server.index.kinds import Kind
from retrieval_server.protocol import BadIndex

NAME = "manifest.json"
BM25, TANTIVY, VECTORS = "bm25", "tantivy", "index.faiss"  # beside it
PARTS = "part_*"  # of a FAISS file, joined in order, in a folder without a manifest
FORMAT = 1
_BUILD = "build it with forage index"


class EncoderMark(msgspec.Struct, frozen=True):
    """The encoder of a dense index: where it was, what it was and how it was used."""

    path: str
    digest: str
    dimension: int
    usage: EncoderSettings
    dtype: str


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The files of an index folder, and the corpus and encoder that it was built from.

    `kind` "bm25": a folder as bm25s writes it; "tantivy": one as tantivy does; "dense": one FAISS
    file of `factory`. `library`: its name and version. `parameters`: of the ranker, or of the FAISS
    index, with what it was trained on. `unpacked`: the folder holds the passages' lines, for the
    corpus is packed.
    """

    format: int
    kind: Kind
    passages: int
    corpus_path: str
    corpus: Mark
    library: str
    files: dict[str, Mark]
    factory: str = ""
    encoder: EncoderMark | None = None
    unpacked: bool = False
    parameters: dict[str, int | float | str] = {}


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, durably."""
    write_json(folder / NAME, manifest)


def read(folder: Path) -> Manifest:
    """The folder's manifest. Raises BadIndex naming the file and the remedy."""
    path = folder / NAME
    if not path.is_file():
        raise BadIndex(f"{str(folder)!r} holds no {NAME}: no index, or one half built: {_BUILD}")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise BadIndex(f"{str(path)!r} cannot be read ({error}): {_BUILD}") from error
    if manifest.format != FORMAT:
        raise BadIndex(
            f"{str(path)!r} is of format {manifest.format}, this is {FORMAT}: {_BUILD} again"
        )
    return manifest


def check(folder: Path, manifest: Manifest, corpus: Path) -> None:
    """Raise BadIndex where a file or the corpus is not what was built, sizes looked at first."""
    for name, was in manifest.files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else -1
        if size != was.bytes:
            found = "is missing" if size < 0 else f"has {size} bytes instead of {was.bytes}"
            raise BadIndex(f"{str(folder / name)!r} {found}: copy it again, or {_BUILD}")
    files = files_of(corpus)
    size = sum(path.stat().st_size for path in files)
    if size != manifest.corpus.bytes or mark(files) != manifest.corpus:
        raise BadIndex(
            f"the index {str(folder)!r} was built from {manifest.corpus_path!r}, "
            f"{manifest.passages} passages, and {str(corpus)!r} holds something else: name the "
            f"corpus it was built from, or {_BUILD} from this one"
        )
    for name, was in manifest.files.items():
        if mark([folder / name]) != was:
            raise BadIndex(f"{str(folder / name)!r} is damaged: copy it again, or {_BUILD}")
