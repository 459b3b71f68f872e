"""Corpora and indexes of `scripts/bench_retrieval.py`, made by `scripts/build_index.py` and timed.

Consumes a corpus; produces index folders in `.cache`, each with a record of what it cost beside it,
so that a second run need not make them again. Waits for the builds.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from retrieval_server.corpus import load_corpus
from retrieval_server.manifest import NAME
from scripts.bench_retrieval_encoder import make_encoder
from scripts.bench_retrieval_run import digest_of
from scripts.bench_stream_run import Processes, RunFailed

REPOSITORY = Path(__file__).resolve().parent.parent
DEADLINE_S = 3600.0
# What decides an index beside its corpus: after a change it is made, and timed, anew.
MAKERS = [
    *(REPOSITORY / "retrieval_server" / f"{name}.py"
      for name in ("building", "encoder", "index_bm25", "index_faiss", "rows", "usage")),
    REPOSITORY / "scripts" / "bench_retrieval_encoder.py",
]  # fmt: skip
DENSE = ("--factory", "HNSW32", "--max-passage-tokens", "32", "--threads", "2")


def build(
    processes: Processes, corpus: Path, folder: Path, kind: str, fresh: bool
) -> tuple[Path, dict[str, Any]]:
    """An index (`bm25` or `dense`) of the corpus, and seconds, bytes on disk and the builder's peak
    memory. Interrupted, it goes on; the seconds of all attempts count. Raises RunFailed.
    """
    given: tuple[str, ...] = ()
    if kind == "dense":
        texts = (document.contents for document in load_corpus(corpus))
        encoder = make_encoder(folder / f"minilm-l6-shape-{digest_of([corpus])}", texts)
        given = ("--encoder", str(encoder), *DENSE)
    made = folder / f"{kind}-{digest_of([corpus, *MAKERS])}"
    record = made.with_suffix(".json")
    if fresh:
        shutil.rmtree(made, ignore_errors=True)
        record.unlink(missing_ok=True)
    told = json.loads(record.read_text()) if record.exists() else {"seconds": 0.0}
    if not (made / NAME).exists():
        begin_s = time.monotonic()
        script = str(REPOSITORY / "scripts" / "build_index.py")
        processes.start("build", script, str(corpus), str(made), *given)
        try:
            processes.wait(["build"], DEADLINE_S, lambda: False)
        finally:
            told["seconds"] += time.monotonic() - begin_s
            peak = processes.peak_rss_bytes.get("build", 0)
            told["peak_rss_bytes"] = max(told.get("peak_rss_bytes", 0), peak)
            record.write_text(json.dumps(told))
    told["file_bytes"] = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
    return made, told


def recalls(processes: Processes, corpus: Path, folder: Path, queries: int) -> dict[str, Any]:
    """What scripts.bench_retrieval_recall finds. Raises RunFailed."""
    out = folder / "recall.json"
    words = ("-m", "scripts.bench_retrieval_recall", str(corpus), str(out), str(queries))
    processes.start("recall", *words)
    processes.wait(["recall"], DEADLINE_S, lambda: False)
    if not out.exists():
        raise RunFailed("recall ended without figures")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found
