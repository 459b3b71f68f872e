"""`python scripts/build_index.py CORPUS OUT`: an index that the retrieval server opens.

BM25 without, a dense one with `--encoder`. A build that was interrupted goes on when the same
command is given again, and ends in the same index.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from configs.process import limit_threads
from retrieval_server.building import build_bm25, build_dense
from retrieval_server.manifest import Manifest
from retrieval_server.protocol import RetrievalError
from retrieval_server.usage import EncoderSettings, require_encoder, settings_of

if TYPE_CHECKING:
    from retrieval_server.encoder import Encoder

DENSE = ("factory", "pooling", "query_prefix", "passage_prefix", "max_passage_tokens", "dtype")


def main(given: Sequence[str] | None = None) -> int:
    """Build, and say what was built; 2 when something that was given is at fault."""
    arguments = _parser().parse_args(given)
    limit_threads(arguments.threads)
    begun = time.monotonic()
    try:
        with _bar() as progress:
            made = _build(arguments, progress)
    except (RetrievalError, OSError) as error:
        print(f"build_index: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("build_index: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    kind = f"{made.library}, {made.factory}" if made.factory else made.library
    size = sum(file.bytes for file in made.files.values())
    print(
        f"{made.passages:,} passages, {kind}, {size / 1e6:,.1f} MB, "
        f"{time.monotonic() - begun:.1f} s: serve it with retrieval.index={arguments.out}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="JSONL (plain or .gz), parquet, or its folder")
    parser.add_argument("out", type=Path, help="a new folder, or that of an interrupted build")
    dense = parser.add_argument_group("dense")
    dense.add_argument("--encoder", type=Path, help="a folder as transformers saves it")
    dense.add_argument("--factory", help="Flat (default), HNSW32, IVF256,Flat or any other")
    dense.add_argument("--pooling", choices=["mean", "cls", "last"], help="default: the model's")
    dense.add_argument("--query-prefix", help="default: the model's")
    dense.add_argument("--passage-prefix", help="default: the model's")
    dense.add_argument("--max-passage-tokens", type=int, help="default: 256")
    dense.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    dense.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser


def _build(arguments: argparse.Namespace, progress: Callable[[str, int, int], None]) -> Manifest:
    corpus, out = arguments.corpus, arguments.out
    if arguments.threads < 1:
        raise RetrievalError(f"--threads {arguments.threads}: at least 1")
    if arguments.threads < 1:
        raise RetrievalError(f"--threads {arguments.threads}: at least 1")
    if arguments.encoder is None:
        if said := [name for name in DENSE if getattr(arguments, name) is not None]:
            raise RetrievalError(
                f"--{said[0].replace('_', '-')} is for dense indexes: name an --encoder"
            )
        return build_bm25(corpus, out, progress)
    require_encoder(arguments.encoder)
    progress("loading the encoder", 0, 0)
    factory = arguments.factory or "Flat"
    return build_dense(corpus, out, _encoder(arguments), factory, arguments.threads, progress)


def _encoder(arguments: argparse.Namespace) -> "Encoder":
    import torch

    from retrieval_server.encoder import Encoder

    torch.set_num_threads(arguments.threads)
    usage: EncoderSettings = settings_of(arguments.encoder)
    given = {
        name: getattr(arguments, name)
        for name in ("pooling", "query_prefix", "passage_prefix", "max_passage_tokens")
        if getattr(arguments, name) is not None
    }
    usage = msgspec.structs.replace(usage, **given)
    return Encoder(arguments.encoder, usage, arguments.dtype or "float32", arguments.device)


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(elapsed_when_finished=True)) as bar:
        tasks = {}

        def progress(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=None)
            bar.update(tasks[step], completed=done, total=total or None)

        yield progress


if __name__ == "__main__":
    sys.exit(main())
