"""The demo's encoder, a one-layer BERT, and its index: made once per seed and cached.

Trained from nothing, by contrast (InfoNCE), on the training countries' facts only, with hard
negatives: of the same name with another relation, of the same relation with a name that looks
alike. Names are made of syllables, its tokens, so that it handles names it has not seen. Judged on
the held-out facts among all the world's passages.
"""

import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import BatchEncoding, BertConfig, BertModel, BertTokenizer

from configs.runtime.files import making, write_json
from retrieval_server.encoder import Encoder
from retrieval_server.encoder_settings import digest_of
from retrieval_server.index import manifest
from retrieval_server.index.build import build_dense
from scripts.demo import tokenizer
from scripts.demo import world as demo_world
from scripts.demo.errors import EncoderFailed
from scripts.demo.start import Report, one_thread
from scripts.demo.task import COUNTRIES, HELD_OUT, digest_with
from scripts.demo.tokenizer import WORDS
from scripts.demo.world import RELATIONS, SYLLABLES, Fact, World, make_world, split

NAME = "syllable-encoder"  # of the model's folder, which the server names in /info
FACTORY = "Flat"  # exact
TOP_K = 3  # as in configs/demo.yaml
QUERY, PASSAGE = "query: ", "passage: "  # as e5 has them
VOCABULARY = (
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":",
    *WORDS, *SYLLABLES, *(f"##{s}" for s in SYLLABLES),
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The encoder's shape and its training."""

    hidden: int = 128
    heads: int = 4  # of 32
    layers: int = 1
    feed_forward: int = 256
    max_tokens: int = 64
    steps: int = 120
    countries: int = 4  # a batch, and as many neighbours in spelling
    lr: float = 3e-3
    warmup_steps: int = 20
    temperature: float = 0.05
    found: float = 0.95  # of the held-out facts, at least, are among the first three


RECIPE = Recipe()


class SyllableEncoder:
    """The encoder in training: texts → unit vectors, the mean over a text's tokens."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        torch.manual_seed(seed)
        self.recipe = recipe
        ids = {token: number for number, token in enumerate(VOCABULARY)}
        self.tokenizer = BertTokenizer(vocab=ids, model_max_length=recipe.max_tokens)
        self.model = BertModel(
            BertConfig(
                vocab_size=len(VOCABULARY),
                hidden_size=recipe.hidden,
                num_hidden_layers=recipe.layers,
                num_attention_heads=recipe.heads,
                intermediate_size=recipe.feed_forward,
                max_position_embeddings=recipe.max_tokens,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                pad_token_id=ids["[PAD]"],
            )
        )
        self._optimiser = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0)

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """float32[N, D], of length 1."""
        rows: BatchEncoding = self.tokenizer(
            list(texts), padding=True, truncation=True, return_tensors="pt"
        )
        hidden = self.model(**rows).last_hidden_state
        own = rows["attention_mask"][..., None]
        return functional.normalize((hidden * own).sum(1) / own.sum(1), dim=-1)

    def step(self, facts: Sequence[Fact], rng: random.Random, lr: float) -> float:
        """Learn to tell these facts apart, each by a query of its own; return the loss."""
        asked = [ask(fact, rng) for fact in facts]
        queries = self([QUERY + text for text in asked])
        passages = self([PASSAGE + fact.passage for fact in facts])
        loss = contrast(queries @ passages.T / self.recipe.temperature, asked, facts)
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        self._optimiser.zero_grad()
        loss.backward()
        self._optimiser.step()
        return float(loss.item())

    def save(self, folder: Path) -> None:
        """Write a model folder, with the files of sentence-transformers beside the weights."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        prompts = {"query": QUERY, "passage": PASSAGE, "document": PASSAGE}
        limit = {"max_seq_length": self.recipe.max_tokens, "do_lower_case": False}
        write_use(folder, self.recipe.hidden)
        write_json(folder / "sentence_bert_config.json", limit)
        write_json(
            folder / "config_sentence_transformers.json",
            {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
        )


def write_use(folder: Path, dimension: int) -> None:
    """Say beside a model, as sentence-transformers does: the mean over tokens, of length 1."""
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    kinds = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(modules)
    ]
    pooling = {
        "word_embedding_dimension": dimension,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    write_json(folder / "modules.json", kinds)
    write_json(folder / "1_Pooling" / "config.json", pooling)


def ask(fact: Fact, rng: random.Random) -> str:
    """A query that the fact answers: mostly the plain one, else that of an unskilled policy."""
    plain = f"{fact.relation} of {fact.subject}"
    if (kind := rng.random()) < 0.1:
        return fact.subject
    if kind < 0.3 and fact.relation in RELATIONS:
        plain = f"{rng.choice(RELATIONS[fact.relation])} of the {plain}"
    return f"what is the {plain} ?" if rng.random() < 0.1 else plain


def contrast(scores: torch.Tensor, asked: Sequence[str], facts: Sequence[Fact]) -> torch.Tensor:
    """The loss of scores [N, N] of queries for passages: InfoNCE twice, of the fact that answers a
    query against all the others, and of all that name its subject against those that do not. The
    second puts a name before its neighbours in spelling: after the right fact come others of the
    same name, as in a search by words, and not the same relation of a name that looks alike.
    """
    about = torch.tensor([[a.subject == b.subject for b in facts] for a in facts])
    names = about | torch.tensor([[a.subject == b.value for b in facts] for a in facts])
    bare = torch.tensor([text == fact.subject for text, fact in zip(asked, facts, strict=True)])
    own = torch.eye(len(facts), dtype=torch.bool)
    others = names & ~own & bare[:, None]  # they answer a bare name as well
    answer = functional.cross_entropy(scores.masked_fill(others, -torch.inf), own.long().argmax(1))
    strange = scores.masked_fill(names, -torch.inf).logsumexp(1, keepdim=True)
    named = (torch.logaddexp(scores, strange) - scores)[about].mean()
    return answer + named


def train(world: World, recipe: Recipe, seed: int, report: Report) -> SyllableEncoder:
    """Train an encoder to find the facts of `world`."""
    encoder, rng, begun = SyllableEncoder(recipe, seed), random.Random(seed), time.monotonic()
    near = neighbours(world)
    for step in range(1, recipe.steps + 1):
        rate = min(step / recipe.warmup_steps, 1 - step / (recipe.steps + 1))
        loss = encoder.step(batch(world, near, recipe.countries, rng), rng, recipe.lr * rate)
        if step % 50 == 0:
            report(f"encoder {time.monotonic() - begun:4.1f} s: step {step}, loss {loss:.3f}")
    return encoder


def neighbours(world: World) -> dict[str, list[tuple[Fact, ...]]]:
    """By subject: the facts of each other subject that shares a syllable with it."""
    about: dict[str, tuple[Fact, ...]] = {}
    for fact in world.facts:
        about[fact.subject] = (*about.get(fact.subject, ()), fact)
    return {
        name: [
            facts
            for other, facts in about.items()
            if other != name and (other[:2] == name[:2] or other[2:] == name[2:])
        ]
        for name in about
    }


def batch(
    world: World, near: dict[str, list[tuple[Fact, ...]]], countries: int, rng: random.Random
) -> list[Fact]:
    """The facts of some countries, and those of a neighbour of each of their subjects."""
    chosen = [fact for country in rng.sample(world.countries, countries) for fact in country.facts]
    for name in dict.fromkeys(fact.subject for fact in chosen):
        chosen += rng.choice(near[name]) if near[name] else ()
    return list(dict.fromkeys(chosen))


def ranks(encoder: Encoder, world: World, asked: Sequence[Fact]) -> NDArray[np.int64]:
    """int64[N]: the number of passages before a fact's own, for the plain query for each fact;
    those as near as it included (an encoder for which all is alike finds nothing). Exact search by
    inner product.
    """
    passages = encoder.passages([fact.passage for fact in world.facts])
    scores = encoder.queries([f"{fact.relation} of {fact.subject}" for fact in asked]) @ passages.T
    place = {fact: number for number, fact in enumerate(world.facts)}
    own = scores[np.arange(len(asked)), [place[fact] for fact in asked]]
    before: NDArray[np.int64] = (scores >= own[:, None]).sum(1) - 1
    return before


def prepare(cache: Path, seed: int, report: Report, recipe: Recipe = RECIPE) -> Path:
    """Return the encoder's folder of `seed`, made if it is not cached. Raises EncoderFailed."""
    sources = (__file__, tokenizer.__file__, demo_world.__file__)
    digest = digest_with(f"{seed} {recipe} {COUNTRIES} {HELD_OUT}", sources)
    folder = cache / f"demo-encoder-{seed}-{digest}"
    if folder.is_dir():
        report(f"cached in {folder}")
        return folder / NAME
    with making(folder, durable=False) as draft:
        make(draft / NAME, seed, report, recipe)
    return folder / NAME


def make(folder: Path, seed: int, report: Report, recipe: Recipe) -> None:
    """Train an encoder, save it, and judge what was saved. Raises EncoderFailed."""
    with one_thread():
        world = make_world(seed, COUNTRIES)
        training, held_out = split(world, HELD_OUT, seed)
        train(training, recipe, seed, report).save(folder)
        found = ranks(Encoder(folder), world, held_out.facts)
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
    """Return the demo's dense index, made unless cached. Raises EncoderFailed, BadIndex."""
    from retrieval_server.index import faiss_index  # late: a demo that searches by words needs none

    model = prepare(cache, seed, report, recipe)
    marks = (str(model.resolve()), digest_of(model), manifest.FORMAT, faiss_index.VERSION)
    digest = hashlib.blake2b(repr(marks).encode() + corpus.read_bytes(), digest_size=6)
    folder = cache / f"demo-index-{seed}-{digest.hexdigest()}"
    if (folder / manifest.NAME).is_file():
        report(f"cached in {folder}")
        return folder
    made = build_dense(corpus, folder, Encoder(model), FACTORY, 1, lambda *_: None)
    report(f"index: {made.passages} vectors of {recipe.hidden} numbers, {FACTORY}, in {folder}")
    return folder
