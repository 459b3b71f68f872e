"""The demo task's files (model, questions, corpus), made once per seed and cached.

The cache key is a digest of the sources that make them. The corpus has one passage per fact;
held-out questions are about countries that training never asks about.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from configs.runtime.files import locked, making
from configs.runtime.process import REPOSITORY
from scripts.demo.errors import ColdStartFailed
from scripts.demo.world import Chain, all_chains, balanced_chains, make_world, split

PATIENCE_S = 600.0  # while another process makes a task in the same cache
COUNTRIES, HELD_OUT, EVAL_QUESTIONS, SUB_SEEDS = 120, 0.25, 240, 4
# Named, not imported: where the task is cached, nothing needs torch.
_MAKERS = (
    "scripts/demo/task.py", "scripts/demo/play.py", "scripts/demo/start.py",
    "scripts/demo/tokenizer.py", "scripts/demo/world.py", "learner/imitation.py",
    "learner/packing.py",
)  # fmt: skip
_SOURCES = tuple(str(REPOSITORY / name) for name in _MAKERS)


@dataclasses.dataclass(frozen=True)
class DemoFiles:
    """Paths; `held_out`: every question about countries never trained on, `eval` its first part."""

    model: Path
    train: Path
    eval: Path
    corpus: Path
    held_out: Path


def prepare(cache: Path, seed: int, report: Callable[[str], None]) -> DemoFiles:
    """Return the files of `seed`, making them if they are not cached. Raises TaskFailed."""
    folder = cache / f"demo-{seed}-{digest_with(str(seed), _SOURCES)}"
    files = DemoFiles(
        model=folder / "model",
        train=folder / "train.jsonl",
        eval=folder / "eval.jsonl",
        corpus=folder / "corpus.jsonl",
        held_out=folder / "held_out.jsonl",
    )
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache, "another demo", patience_s=PATIENCE_S):  # it may make the same
        if folder.is_dir():
            report(f"cached in {folder}")
            return files
        with making(folder, durable=False) as draft:
            _make(draft, seed, report)
    return files


def _make(folder: Path, seed: int, report: Callable[[str], None]) -> None:
    from scripts.demo.start import Recipe, cold_start, one_thread
    from scripts.demo.tokenizer import save_tokenizer

    world, recipe = make_world(seed, COUNTRIES), Recipe()
    train, held_out = split(world, HELD_OUT, seed)
    unseen = all_chains(held_out, seed)
    asked = unseen[:EVAL_QUESTIONS]
    with one_thread():
        for sub_seed in range(SUB_SEEDS):
            try:
                model = cold_start(recipe, 1000 * seed + sub_seed, world, asked, report)
                break
            except ColdStartFailed as error:
                report(f"sub-seed {sub_seed}: {error}")
        else:
            raise ColdStartFailed(
                f"none of {SUB_SEEDS} sub-seeds of seed {seed} gave a usable start"
            )
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model", recipe.max_tokens)
    _write(folder / "train.jsonl", _rows("train", balanced_chains(train, seed)))
    _write(folder / "eval.jsonl", _rows("eval", asked))
    _write(folder / "held_out.jsonl", _rows("held-out", unseen))
    facts = [{"id": f"fact-{n}", "contents": f.passage} for n, f in enumerate(world.facts)]
    _write(folder / "corpus.jsonl", facts)


def _rows(name: str, chains: Sequence[Chain]) -> list[dict[str, Any]]:
    return [
        {"id": f"{name}-{n}", "question": c.question, "answers": [c.answer], "hops": c.hops}
        for n, c in enumerate(chains)
    ]


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def digest_with(text: str, sources: Iterable[str]) -> str:
    """The digest of a text and of the sources' contents."""
    digest = hashlib.blake2b(text.encode(), digest_size=6)
    for source in sources:
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()
