"""Whom to ask, and with what: runs, checkpoints, folders, URLs; bad input is refused before."""

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import ConfigError, save
from configs.retrieval import RetrievalConfig
from configs.runtime.process import Exit
from configs.schema import Config, ModelConfig
from learner import checkpoint
from scripts import cli
from scripts.ask import ask
from tests.scripts.conftest import Exporter
from tests.scripts.parsing import parsed


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model's."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 96, "max_position_embeddings": 4096}')
    (folder / "model.safetensors").write_bytes(b"0" * 8)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """An override that names passages."""
    (tmp_path / "c.jsonl").write_text('{"id": "1", "contents": "Title\\ntext"}\n')
    return f"retrieval.corpus={tmp_path / 'c.jsonl'}"


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A configuration that leaves all as it is."""
    (tmp_path / "base.yaml").write_text("{}\n")
    return f"--config={tmp_path / 'base.yaml'}"


@pytest.fixture
def make_run(tmp_path: Path, model: Path) -> Callable[..., Path]:
    """make_run(steps): a run's folder with checkpoints of these steps."""

    def make(*steps: int) -> Path:
        run = tmp_path / "run"
        run.mkdir()
        settings = {"model": ModelConfig(path=str(model)), "retrieval": RetrievalConfig(top_k=7)}
        config = Config(run_dir=str(run), **settings)
        save(config, run / "config.yaml")
        for step in steps:
            folder = checkpoint.save(config, step, Exporter(), None)  # type: ignore[arg-type]
            shutil.copytree(model, folder / "model")
        return run

    return make


def configured(*words: str) -> Config:
    return ask.configure(parsed("ask", *words))


def test_a_run_is_asked_at_its_best_checkpoint_else_its_newest(
    make_run: Callable[..., Path], corpus: str
) -> None:
    run = make_run(2, 10)
    config = configured(str(run), corpus)
    assert config.model.path == str(run / "checkpoints/step-10/model")
    assert config.retrieval.top_k == 7  # the run's own
    (run / "checkpoints" / checkpoint.BEST).symlink_to("step-2")
    assert configured(str(run), corpus).model.path == str(run / "checkpoints/step-2/model")


@pytest.mark.parametrize("inside", ["", "model"])
def test_a_checkpoint_is_asked_as_it_was_trained(
    make_run: Callable[..., Path], corpus: str, inside: str
) -> None:
    folder = make_run(2) / "checkpoints" / "step-2"
    config = configured(str(folder / inside), corpus, "retrieval.top_k=5")
    assert config.model.path == str(folder / "model")
    assert config.retrieval.top_k == 5 and configured(str(folder), corpus).retrieval.top_k == 7


def test_a_checkpoint_s_average_is_asked(make_run: Callable[..., Path], corpus: str) -> None:
    run = make_run(2)
    average = run / "checkpoints" / "step-2" / "ema"
    shutil.copytree(average.with_name("model"), average)
    assert configured(str(run), corpus, "--weights", "ema").model.path == str(average)


def test_a_model_s_folder_needs_a_configuration(model: Path, corpus: str, base: str) -> None:
    assert configured(str(model), corpus, base).model.path == str(model)
    with pytest.raises(ConfigError, match=r"says nothing of prompts.*name a configuration"):
        configured(str(model), corpus)


def test_a_server_of_one_s_own_has_a_port_of_its_own(model: Path, corpus: str, base: str) -> None:
    config = configured(str(model), corpus, base, "retrieval.port=1", "retrieval.drain_notice_s=9")
    assert config.retrieval.port not in (0, 1) and config.retrieval.drain_notice_s == 0


def test_a_retrieval_server_that_runs_takes_the_place_of_what_the_run_had(
    model: Path, base: str
) -> None:
    url = "http://host:8000"
    config = configured(str(model), base, "--retrieval", url, "retrieval.recorded=runs/x")
    assert (config.retrieval.url, config.retrieval.recorded) == ((url,), "")


def test_a_url_is_asked_with_a_tokenizer_s_folder(tmp_path: Path, base: str, corpus: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")  # and no model
    words = ("http://host:8000", base, corpus)
    assert configured(*words, "--tokenizer", str(tmp_path)).model.path == str(tmp_path)
    assert configured(*words, f"model.path={tmp_path}").model.path == str(tmp_path)


def test_an_environment_that_searches_nothing_needs_nothing_to_search(
    model: Path, base: str
) -> None:
    config = configured(str(model), base, "--environment", "no_search")
    assert config.environment.name == "no_search" and not ask.searches(config)
    with pytest.raises(ConfigError, match=r"retrieval.corpus and retrieval.url are empty"):
        configured(str(model), base, "--environment", "rag")


def test_a_program_is_not_asked_turn_by_turn(model: Path, base: str) -> None:
    program = ("environment.name=program", "environment.program.command=[python3]")
    with pytest.raises(ConfigError, match="a program is not played turn by turn here: run it in"):
        configured(str(model), base, *program)


def test_questions_and_overrides_are_told_apart() -> None:
    words = ["who?", "--json", "retrieval.top_k=2", "1 + 1 = 2?", "E=mc2 was when?", "seed=1"]
    given = parsed("ask", "runs/x", *words)
    assert given.questions == ["who?", "1 + 1 = 2?", "E=mc2 was when?"]
    assert given.overrides == ["retrieval.top_k=2", "seed=1"]


def test_without_searches_nothing_to_search_is_needed(model: Path, base: str) -> None:
    config = configured(str(model), base, "--environment", "no_search")
    assert (config.environment.name, config.retrieval.corpus) == ("no_search", "")


def test_without_questions_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("who?\n\n  what? \n"))
    assert list(ask.questions(parsed("ask", "runs/x"))) == ["who?", "what?"]
    assert list(ask.questions(parsed("ask", "runs/x", "why?"))) == ["why?"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "'nowhere': no such folder: name a run, a checkpoint, a Hugging Face folder"),
        (["{empty}"], "no run (config.yaml), checkpoint (checkpoint.json) or Hugging Face folder"),
        (["{model}"], "--config FILE, for example configs/base.yaml"),
        (["{model}", "{base}"], "retrieval.corpus and retrieval.url are empty"),
        (["{model}", "{base}", "{corpus}", "--environment", "x"], "environment.name = 'x'"),
        (["{model}", "{base}", "{corpus}", "--environment", "no.such:x"], "no.such cannot"),
        (["{model}", "{base}", "retrieval.corpus=nowhere"], "retrieval.corpus = 'nowhere'"),
        (["{model}", "{base}", "{corpus}", "model.path=m"], "model.path is what MODEL says"),
        (["{model}", "{base}", "{corpus}", "retreival.top_k=1"], "did you mean 'retrieval'"),
        (["{model}", "{base}", "--retrieval", "host"], "--retrieval 'host': give http://HOST:PORT"),
        (
            ["{model}", "{base}", "{corpus}", "--environment", "no:such"],
            "environment.name = 'no:such'",
        ),
        (["http://h", "{base}", "{corpus}"], "no tokenizer is named"),
        (["http://h", "{base}", "{corpus}", "--tokenizer", "{empty}"], "no tokenizer (tokenizer.j"),
        (["http://h", "{corpus}"], "--config FILE"),
        (["http://h:p", "{base}", "{corpus}"], "is no URL of a server"),
        (["http://h", "{base}", "{corpus}", "--key-file", "nowhere"], "--key-file 'nowhere'"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    tmp_path: Path,
    model: Path,
    base: str,
    corpus: str,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    (tmp_path / "empty").mkdir()
    known = {"empty": tmp_path / "empty", "model": model, "base": base, "corpus": corpus}
    assert cli.main(["ask", *(word.format(**known) for word in words)]) == Exit.BAD_INPUT
    out, err = capsys.readouterr()
    assert err.startswith("forage: ") and said in err and not out


def test_a_run_without_a_checkpoint_is_refused(make_run: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"this run has no checkpoint yet"):
        configured(str(make_run()))


@pytest.mark.parametrize(
    "words",
    [
        ["runs/x", "--temperature", "-1"],
        ["runs/x", "--temperature", "nan"],
        ["m", "--model", "n"],
        ["http://h", "--weights", "ema"],
    ],
)
def test_options_that_cannot_be_meant_are_refused(words: list[str]) -> None:
    assert cli.main(["ask", *words]) == Exit.BAD_INPUT


def test_the_key_is_a_file_s_else_the_environment_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text("sesame-12\n")
    path.chmod(0o600)
    monkeypatch.setenv("OPENAI_API_KEY", "other-34")
    assert (ask.read_key(str(path)), ask.read_key(None)) == ("sesame-12", "other-34")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert ask.read_key(None) == ""


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"sesame", 0o640, "mode 0640 lets others read it: chmod 600"),
        (b"", 0o600, "it must hold the key"),
        (b"two\nlines", 0o600, "it must hold the key"),
        ("schlüssel".encode(), 0o600, "name a file that holds the key"),
    ],
)
def test_a_file_that_holds_no_key_is_refused(
    tmp_path: Path, content: bytes, mode: int, said: str
) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=said) as refused:
        ask.read_key(str(path))
    assert "sesame" not in str(refused.value)


def test_bad_input_need_not_wait_for_what_models_need() -> None:
    heavy = "{'torch', 'transformers', 'vllm', 'ray', 'deepspeed'}"
    look = f"import sys, scripts.ask.ask; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0
