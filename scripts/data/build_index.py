"""An index of a corpus, of words or dense with `--encoder`; an interrupted build goes on."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from configs.load import ConfigError
from configs.runtime.files import full_disk
from configs.runtime.process import limit_threads
from retrieval_server.encoder_settings import EncoderSettings, require_encoder, settings_of
from retrieval_server.index.build import build_bm25, build_dense, build_tantivy
from retrieval_server.index.manifest import Manifest
from retrieval_server.protocol import RetrievalError
from scripts.command.options import Options, argument, flag, option, refusing
from scripts.command.terminal import Bars
from scripts.setup import hub

if TYPE_CHECKING:
    from retrieval_server.encoder import Encoder

DENSE = ("factory", "pooling", "query_prefix", "passage_prefix", "max_passage_tokens", "dtype")


@dataclass(frozen=True)
class IndexOptions(Options):
    """Options of `forage index`. Raises ConfigError for options that contradict each other."""

    corpus: Path = argument("JSONL (plain or .gz), parquet, or its folder")
    out: Path = argument("a new folder, or that of an interrupted build")
    kind: Literal["bm25", "tantivy"] | None = option(
        "of an index of words: bm25 (default), or tantivy, another ranker, for large corpora"
    )
    encoder: Path | None = option("for a dense index: a folder, or a name on the Hub")
    factory: str | None = option("Flat (default), HNSW32, SQ8, IVF4096,PQ96 or any other")
    pooling: Literal["mean", "cls", "last"] | None = option("default: the model's")
    query_prefix: str | None = option("default: the model's")
    passage_prefix: str | None = option("default: the model's")
    max_passage_tokens: int | None = option("default: 256")
    dtype: Literal["float32", "bfloat16", "float16"] | None = option("default: float32")
    device: Literal["cpu", "cuda"] = option("of the encoder", default="cpu")
    threads: int = option("default: all cores", default=os.cpu_count() or 1, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        said = [name for name in DENSE if getattr(self, name) is not None]
        if said and self.encoder is None:
            raise ConfigError(f"{flag(said[0])} is for dense indexes: name an --encoder")
        if self.kind and self.encoder:
            raise ConfigError(
                f"--kind = {self.kind!r} is of an index of words, and --encoder makes a dense one: "
                "leave one out"
            )


def index(options: IndexOptions) -> None:
    """Build, and print what was built. Raises ConfigError for an unusable corpus or encoder."""
    limit_threads(options.threads)
    begun = time.monotonic()
    try:
        with refusing(RetrievalError, OSError), _bar() as progress, _writing(options.out):
            made = _build(options, progress)
    except KeyboardInterrupt:
        print("forage: interrupted; the same command goes on from here", file=sys.stderr)
        raise
    kind = f"{made.library}, {made.factory}" if made.factory else made.library
    meant = " retrieval.kind=tantivy" if made.kind == "tantivy" else ""
    size = sum(file.bytes for file in made.files.values())
    print(
        f"{made.passages:,} passages, {kind}, {size / 1e6:,.1f} MB, "
        f"{time.monotonic() - begun:.1f} s: serve it with retrieval.index={options.out}{meant}"
    )


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise ConfigError where the disk of `folder` is full, whichever library met that."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        if full := full_disk(folder, error):
            raise ConfigError(full) from error
        raise


def _build(options: IndexOptions, progress: Callable[[str, int, int], None]) -> Manifest:
    corpus, out = options.corpus, options.out
    if options.encoder is None:
        build = build_tantivy if options.kind == "tantivy" else build_bm25
        return build(corpus, out, progress)
    folder = Path(hub.model("--encoder", str(options.encoder)))
    require_encoder(folder)
    progress("loading the encoder", 0, 0)
    encoder, factory = _encoder(options, folder), options.factory or "Flat"
    return build_dense(corpus, out, encoder, factory, options.threads, progress)


def _encoder(options: IndexOptions, folder: Path) -> "Encoder":
    import torch

    from retrieval_server.encoder import Encoder

    torch.set_num_threads(options.threads)
    given = {
        name: getattr(options, name)
        for name in ("pooling", "query_prefix", "passage_prefix", "max_passage_tokens")
        if getattr(options, name) is not None
    }
    settings: EncoderSettings = msgspec.structs.replace(settings_of(folder), **given)
    return Encoder(folder, settings, options.dtype or "float32", options.device)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, TimeRemainingColumn(elapsed_when_finished=True)) as bar:
        tasks = {}

        def progress(step: str, done: int, total: int) -> None:
            if step not in tasks:
                for each in bar.tasks:  # those of an unknown length are done now
                    bar.update(each.id, total=each.total or each.completed)
                tasks[step] = bar.add_task(step, total=None)
            bar.update(tasks[step], completed=done, total=total or None)

        yield progress
