"""The demo's encoder and its index, made once per seed and cached by a hash of what makes them.

Trained (scripts/demo_contrast.py) on the training countries' facts only; judged on the held-out
ones', all the world's passages being in the way. `scripts/demo_encoder.py [--seed N] [--cache DIR]`
makes the encoder by hand.
"""

import argparse
import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval_server import manifest
from retrieval_server.building import build_dense
from retrieval_server.encoder import Encoder
from retrieval_server.usage import digest_of
from scripts.demo_contrast import Recipe, Report, train
from scripts.demo_task import COUNTRIES, HELD_OUT
from scripts.demo_world import Fact, World, make_world, split

NAME = "syllable-encoder"  # of the model's folder, which the server names in /info
FACTORY = "Flat"  # exact
RECIPE = Recipe()
TOP_K = 3  # as in configs/demo.yaml
SOURCES = ("demo_contrast.py", "demo_encoder.py", "demo_tokenizer.py", "demo_world.py")


class EncoderFailed(RuntimeError):
    """The encoder does not find held-out facts."""


def ranks(encoder: Encoder, world: World, asked: Sequence[Fact]) -> NDArray[np.int64]:
    """int64[N]: how many of the world's passages come before its own for the plain query for each
    fact, those as near as it included (an encoder for which all is alike finds nothing).

    Exact search by inner product.
    """
    passages = encoder.passages([fact.passage for fact in world.facts])
    scores = encoder.queries([f"{fact.relation} of {fact.subject}" for fact in asked]) @ passages.T
    place = {fact: number for number, fact in enumerate(world.facts)}
    own = scores[np.arange(len(asked)), [place[fact] for fact in asked]]
    before: NDArray[np.int64] = (scores >= own[:, None]).sum(1) - 1
    return before


def prepare(cache: Path, seed: int, report: Report, recipe: Recipe = RECIPE) -> Path:
    """Return the encoder's folder of `seed`, made if it is not cached. Raises EncoderFailed."""
    folder = cache / f"demo-encoder-{seed}-{_digest(seed, recipe)}"
    if folder.is_dir():
        report(f"cached in {folder}")
        return folder / NAME
    draft = cache / f".making-{folder.name}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    make(draft / NAME, seed, report, recipe)
    draft.rename(folder)
    return folder / NAME


def make(folder: Path, seed: int, report: Report, recipe: Recipe) -> None:
    """Train an encoder, save it, and judge what was saved. Raises EncoderFailed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads spin against each other on a small machine
    try:
        world = make_world(seed, COUNTRIES)
        training, held_out = split(world, HELD_OUT, seed)
        train(training, recipe, seed, report).save(folder)
        found = ranks(Encoder(folder), world, held_out.facts)
    finally:
        torch.set_num_threads(threads)
    first, top = float((found < 1).mean()), float((found < TOP_K).mean())
    said = (
        f"{first:.3f} of {len(found)} held-out facts first, {top:.3f} in the top {TOP_K}, among "
        f"{len(world.facts)} passages"
    )
    report(f"encoder: {said}")
    if top < recipe.found:
        raise EncoderFailed(f"{said}: below {recipe.found}")


def prepare_index(
    cache: Path, seed: int, corpus: Path, report: Report, recipe: Recipe = RECIPE
) -> Path:
    """Return the folder of a dense, exact index of the demo's corpus, making it and its encoder
    where they are not cached. Raises EncoderFailed, and BadIndex while another process makes it.
    """
    from retrieval_server import index_faiss  # late: a demo that searches by words needs none

    model = prepare(cache, seed, report, recipe)
    marks = (str(model.resolve()), digest_of(model), manifest.FORMAT, index_faiss.VERSION)
    digest = hashlib.blake2b(repr(marks).encode() + corpus.read_bytes(), digest_size=6)
    folder = cache / f"demo-index-{seed}-{digest.hexdigest()}"
    if (folder / manifest.NAME).is_file():
        report(f"cached in {folder}")
        return folder
    made = build_dense(corpus, folder, Encoder(model), FACTORY, 1, lambda *_: None)
    report(f"index: {made.passages} vectors of {recipe.hidden} numbers, {FACTORY}, in {folder}")
    return folder


def _digest(seed: int, recipe: Recipe) -> str:
    """What the encoder depends on: seed, recipe, the world's size and the sources that make it."""
    digest = hashlib.blake2b(f"{seed} {recipe} {COUNTRIES} {HELD_OUT}".encode(), digest_size=6)
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def main() -> int:
    """Make the encoder and print where it is."""
    parser = argparse.ArgumentParser(description="Train the demo's encoder.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cache", type=Path, default=Path(__file__).resolve().parent.parent / ".cache"
    )
    arguments = parser.parse_args()
    try:
        print(prepare(arguments.cache, arguments.seed, print))
    except EncoderFailed as error:
        print(f"demo_encoder: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
