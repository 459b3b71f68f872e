"""The passages, questions and encoder of `forage bench retrieval`.

Passages are Debian's descriptions of its packages (`apt-cache dumpavail`, as the last `apt-get
update` fetched them), queries are seeded words of theirs. The encoder has MiniLM-L6's shape, seeded
random weights and a real WordPiece vocabulary trained on the corpus: no model can be fetched where
the benchmark must run, and speed does not depend on what was learnt.
"""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from email import message_from_string
from pathlib import Path

from configs.runtime.files import making, write_durably
from retrieval_server.protocol import Document
from scripts.bench.harness import BenchError

SHORTEST, LONGEST = 2, 8  # words of a query
HEAD = 12  # words of a passage, at most, that a query is taken from: title and first sentence
GROUP_SIZE = 8
DUMP_DEADLINE_S = 120.0
_STOP_WORDS = ("the", "a", "of", "what", "is", "for", "in", "about")
_PUNCTUATION = ("?", ".", " ?", "!", ",")
_RELATIONS = ("Depends", "Recommends", "Suggests")

VOCABULARY = 30_522
SHAPE = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class NoCorpus(BenchError):
    """There is nothing to search; the message says what to do."""


def debian(folder: Path, passages: int) -> Path:
    """A corpus of `passages` packages in `folder`, made where it is missing. Raises NoCorpus."""
    path = folder / f"debian-{passages}.jsonl"
    if path.exists():
        return path
    remedy = "run `apt-get update`, or name a corpus of yours: --corpus FILE.jsonl"
    if shutil.which("apt-cache") is None:
        raise NoCorpus(f"this machine has no apt-cache, whose package descriptions serve: {remedy}")
    command = ["apt-cache", "dumpavail"]
    try:
        told = subprocess.run(command, capture_output=True, timeout=DUMP_DEADLINE_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise NoCorpus(f"{error}: {remedy}") from error
    found = list(packages(told.stdout.decode(errors="replace")))
    if len(found) < passages:
        raise NoCorpus(f"apt-cache knows {len(found):,} packages of {passages:,}: {remedy}")
    chosen = random.Random(0).sample(found, passages)
    lines = (json.dumps({"id": name, "contents": contents}) for name, contents in chosen)
    write_durably(path, ("\n".join(lines) + "\n").encode())
    return path


def packages(told: str) -> Iterator[tuple[str, str]]:
    """(name, contents) of every package that is described, each name once."""
    seen: set[str] = set()
    for stanza in told.split("\n\n"):
        lines = message_from_string(stanza).items()  # continued ones in one value
        fields = {name: " ".join(map(str.strip, told.splitlines())) for name, told in lines}
        name = fields.get("Package", "")
        if name and "Description" in fields and name not in seen:
            seen.add(name)
            yield name, f'"{name}"\n{_text(fields)}'


def _text(fields: dict[str, str]) -> str:
    """The description and what else is told in words: as long as the passages of other corpora."""
    needed = ",".join(fields[each] for each in _RELATIONS if fields.get(each))
    names = dict.fromkeys(re.split(r"[ (:|]", each.strip())[0] for each in needed.split(","))
    maintainer = fields.get("Maintainer", "").partition("<")[0].strip()
    told = {
        "Section": fields.get("Section", ""),
        "Tagged": fields.get("Tag", "").replace("::", " "),
        "Needs or suggests": ", ".join(filter(None, names)),
        "Maintained by": maintainer,
        "Home page": fields.get("Homepage", ""),
    }
    rest = (f"{label} {value}." for label, value in told.items() if value)
    return " ".join([fields["Description"].rstrip(".") + ".", *rest])


def draw_queries(documents: Sequence[Document], count: int, seed: int) -> list[str]:
    """`count` different queries, each of 2 to 8 consecutive words of a passage's beginning."""
    chance = random.Random(seed)
    drawn: dict[str, None] = {}
    tries = 0
    while len(drawn) < count:
        tries += 1
        if tries > 100 * count:
            raise NoCorpus(f"{len(documents):,} passages are too few for {count:,} queries")
        begin, _, _ = chance.choice(documents).contents.replace('"', "").partition(". ")
        head = begin.split()[:HEAD]
        if len(head) >= SHORTEST:
            size = chance.randint(SHORTEST, min(LONGEST, len(head)))
            first = chance.randrange(len(head) - size + 1)
            drawn.setdefault(" ".join(head[first : first + size]))
    return list(drawn)


def siblings(question: str, seed: int, size: int = GROUP_SIZE) -> list[str]:
    """The queries of one question's rollouts: half the very same, the others varied a little."""
    chance = random.Random(f"{seed} {question}")
    rest = [_varied(question, chance) for _ in range(size - 1)]
    asked = [question, *rest]
    chance.shuffle(asked)
    return asked


def _varied(question: str, chance: random.Random) -> str:
    words = question.split()
    match chance.randrange(8):
        case 0:
            return question.title() if chance.random() < 0.5 else question.lower()
        case 1:
            return question.rstrip(".,") + chance.choice(_PUNCTUATION)
        case 2:
            at = chance.randrange(len(words) - 1)
            words[at : at + 2] = reversed(words[at : at + 2])
            return " ".join(words)
        case 3:
            words.insert(chance.randrange(len(words)), chance.choice(_STOP_WORDS))
            return " ".join(words)
        case _:
            return question


def make_encoder(folder: Path, texts: Iterable[str]) -> Path:
    """The encoder in `folder`, made where it is missing, its vocabulary from `texts`."""
    if folder.exists():
        return folder
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    from scripts.demo.encoder import write_use

    ids = {token: number for number, token in enumerate(_SPECIAL)}
    blank = BertTokenizer(vocab=ids, model_max_length=SHAPE["max_position_embeddings"])
    tokenizer = blank.train_new_from_iterator(texts, VOCABULARY, show_progress=False)
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=len(tokenizer), **SHAPE)).eval()
    with making(folder, durable=False) as draft:
        tokenizer.save_pretrained(draft)
        model.save_pretrained(draft)
        write_use(draft, SHAPE["hidden_size"])
    return folder
