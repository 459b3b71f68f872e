"""Real passages and questions for `scripts/bench_retrieval.py`: what Debian says of its packages.

Consumes `apt-cache dumpavail` (what the last `apt-get update` fetched); produces a corpus file that
the server reads, and seeded queries of its words. Waits for nothing.
"""

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from retrieval_server.protocol import Document

SHORTEST, LONGEST = 2, 8  # words of a query
HEAD = 12  # words of a passage, at most, that a query is taken from: title and first sentence
GROUP_SIZE = 8
DUMP_DEADLINE_S = 120.0
_STOP_WORDS = ("the", "a", "of", "what", "is", "for", "in", "about")
_PUNCTUATION = ("?", ".", " ?", "!", ",")
_RELATIONS = ("Depends", "Recommends", "Suggests")


class NoCorpus(RuntimeError):
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
    folder.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    lines = (json.dumps({"id": name, "contents": contents}) for name, contents in chosen)
    new.write_text("\n".join(lines) + "\n", encoding="utf-8")
    new.replace(path)
    return path


def packages(told: str) -> Iterator[tuple[str, str]]:
    """(name, contents) of every package that is described, each name once."""
    seen: set[str] = set()
    for stanza in told.split("\n\n"):
        fields = _fields(stanza)
        name = fields.get("Package", "")
        if name and "Description" in fields and name not in seen:
            seen.add(name)
            yield name, f'"{name}"\n{_text(fields)}'


def _fields(stanza: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    last = ""
    for line in stanza.splitlines():
        if line.startswith((" ", "\t")) and last:
            fields[last] += " " + line.strip()
        else:
            last, _, value = line.partition(":")
            fields[last] = value.strip()
    return fields


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
    """What `size` rollouts of one question ask: half of them the very same, others in another
    case, with punctuation, with two words swapped or with a word more that says nothing.
    """
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
