"""Names on the Hub become paths, once; what the Hub or the network has against it is one line."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hf_xet
import huggingface_hub
import pyarrow.parquet
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError

from configs.load import ConfigError, dump, load, parse
from configs.runtime.process import REPOSITORY
from configs.schema import Config, QuestionColumns
from replay.questions import load_questions
from scripts import cli
from scripts.command import terminal
from scripts.data import data_sets
from scripts.evaluation.plan import load_sets
from scripts.setup import hub
from scripts.setup.model_source import find
from scripts.setup.resolve import resolve, with_absolute_paths
from tests.scripts.conftest import Folder
from tests.scripts.setup.hub_server import FakeHub, serving_hub

MODEL = {
    "config.json": b'{"max_position_embeddings": 4096}',
    "model.safetensors": b"0" * 2_000_000,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"no",
    "1_Pooling/config.json": b"{}",
    "README.md": b"a model",
}
KINDS = ("train", "eval")
ROW = b'{"problem": "who?", "answers": ["me"]}\n'


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The Hub that the library asks, and an empty cache."""
    with serving_hub() as server:
        point_at(monkeypatch, server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        server.repositories["models/lab/small"] = MODEL
        yield server


def point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def data_set(served: FakeHub, *files: str) -> None:
    """Have the Hub hold a data set of these files, one row each."""
    served.repositories["datasets/lab/asked"] = dict.fromkeys(files, ROW)


def test_a_model_s_name_becomes_the_folder_of_what_is_needed(
    served: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(hub.model("model.path", "lab/small"))
    held = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert held == {"config.json", "model.safetensors", "tokenizer.json", "1_Pooling/config.json"}
    said = "forage: model.path: fetching lab/small from the Hub (4 files, 2.0 MB)\n"
    assert capsys.readouterr().err == said  # and no bars, for this is no terminal


def test_what_is_cached_is_used_without_asking(
    served: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    first = hub.model("model.path", "lab/small")
    served.requests.clear()
    capsys.readouterr()
    assert hub.model("model.path", "lab/small") == first
    assert (served.requests, capsys.readouterr().err) == ([], "")


def test_a_cache_that_an_older_library_filled_is_used_without_network(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Path(constants.HF_HUB_CACHE) / "models--lab--old" / "snapshots" / ("b" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"0")
    reference = snapshot.parents[1] / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("b" * 40)
    monkeypatch.setattr(hub, "_OFFLINE", True)
    assert hub.model("model.path", "lab/old") == str(snapshot)


@pytest.mark.parametrize("value", ["", "model", "./lab/small", "here/small", "a/b/c", "a--b/c"])
def test_paths_are_left_as_they_are(served: FakeHub, value: str) -> None:
    Path("here").mkdir()
    assert hub.model("model.path", value) == value
    assert hub.questions("questions.train", value) == value
    assert hub.questions("questions.train", "data/train.jsonl") == "data/train.jsonl"
    assert not served.requests


@pytest.mark.parametrize(
    ("files", "value", "chosen"),
    [
        (["data/train-00000-of-00001.parquet"], "lab/asked", "data/train-00000-of-00001.parquet"),
        (["train.jsonl", "dev.jsonl"], "lab/asked", "train.jsonl"),
        (["train.jsonl", "dev.jsonl"], "lab/asked@validation", "dev.jsonl"),
        (["train.jsonl", "dev.jsonl"], "lab/asked@dev", "dev.jsonl"),
        (["train.jsonl", "train.parquet"], "lab/asked", "train.parquet"),
        (["en/train.jsonl", "de/train.jsonl"], "lab/asked:de", "de/train.jsonl"),
        (["a/train/0000.parquet", "a/test/0000.parquet"], "lab/asked", "a/train/0000.parquet"),
        (["easy-00000-of-00001.parquet"], "lab/asked@easy", "easy-00000-of-00001.parquet"),
        (["default/train.jsonl", "x/train.jsonl"], "lab/asked", "default/train.jsonl"),
        (["qa_training_v1.jsonl", "README.md"], "lab/asked", "qa_training_v1.jsonl"),
    ],
)
def test_a_split_is_found_by_the_names_of_its_files(
    served: FakeHub, files: list[str], value: str, chosen: str
) -> None:
    data_set(served, *files)
    path = hub.questions("questions.train", value)
    assert path.endswith(f"/{chosen}") and Path(path).read_bytes() == ROW


def test_other_questions_are_of_validation_or_else_of_test(served: FakeHub) -> None:
    data_set(served, "train.jsonl", "test.jsonl")
    assert hub.questions("questions.eval", "lab/asked").endswith("/test.jsonl")
    served.repositories["datasets/lab/more"] = dict.fromkeys(["test.jsonl", "val.jsonl"], ROW)
    assert hub.questions("questions.eval", "lab/more").endswith("/val.jsonl")


def test_a_split_of_several_files_is_read_as_one(served: FakeHub) -> None:
    files = [f"main/train-0000{n}-of-00002.jsonl" for n in range(2)]
    data_set(served, *files, "main/test-00000-of-00001.jsonl")
    overrides = ["questions.train=lab/asked", "questions.columns.question=problem"]
    config = resolve(base(*overrides), "run")
    questions = load_questions(config.questions.train, columns=config.questions.columns)
    assert [question.text for question in questions] == ["who?", "who?"]


def base(*overrides: str) -> Config:
    return load(REPOSITORY / "configs" / "base.yaml", overrides)


FIELDS = ("model.path", "retrieval.encoder", "rewards.similarity.model")


def test_a_configuration_holds_paths_and_needs_no_network_again(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set(served, "train.parquet", "validation.parquet")
    named = [f"{field}=lab/small" for field in FIELDS]
    named += ["questions.train=lab/asked", "questions.eval=lab/asked"]
    config = resolve(base(*named, "rewards.weights.similarity=1"), "run")
    folder = config.model.path
    assert Path(folder, "config.json").is_file()
    assert (config.retrieval.encoder, config.rewards.similarity.model) == (folder, folder)
    assert config.questions.train.endswith("/train.parquet")
    assert config.questions.eval.endswith("/validation.parquet")
    monkeypatch.setattr(hub, "_OFFLINE", True)
    again = parse(dump(config), [], "config.yaml")
    assert with_absolute_paths(hub.with_hub_paths(again)) == config


def test_only_the_fields_that_a_command_reads_are_fetched(served: FakeHub) -> None:
    config = base("model.path=lab/small", "questions.train=no/such")
    assert hub.with_hub_paths(config, ("model.path",)).questions.train == "no/such"


def test_a_model_to_ask_or_evaluate_is_called_by_its_name(served: FakeHub) -> None:
    found = find("lab/small")
    assert (found.name, found.given) == ("small", "lab/small")
    assert (found.folder / "config.json").is_file()


def test_a_set_to_evaluate_is_named_after_its_repository(served: FakeHub) -> None:
    data_set(served, "train.jsonl", "dev.jsonl")
    columns = QuestionColumns(question="problem")
    asked, mine = load_sets(["lab/asked", "mine=lab/asked@train"], columns=columns)
    assert (asked.name, asked.path.name, asked.questions[0].text) == ("asked", "dev.jsonl", "who?")
    assert (mine.name, mine.path.name) == ("mine", "train.jsonl")
    with pytest.raises(ConfigError, match=r"^--sets 'lab/asked@x': no split x in it"):
        load_sets(["lab/asked@x"])


def test_a_resumed_run_may_be_given_the_names_again(served: FakeHub, folder: Folder) -> None:
    held = hub.model("model.path", "lab/small")
    folder = folder.edited("model.path", held)
    served.requests.clear()
    assert folder.checked("model.path=lab/small")[0].model.path == held
    assert not served.requests


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no/such", ["nothing of that name is here, and the Hub has none", "`hf auth login`"]),
        ("lab/gated", ["not everybody may read it", "/lab/gated, then `hf auth login`"]),
        ("lab/pickled", ["no *.safetensors in it on the Hub"]),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_in_a_line(
    served: FakeHub, value: str, words: list[str]
) -> None:
    served.repositories["models/lab/gated"] = MODEL
    served.repositories["models/lab/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b""}
    served.gated.add("models/lab/gated")
    said = refused(base(f"model.path={value}"))
    assert said.startswith(f"model.path = {value!r}: ")
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("files", "value", "words"),
    [
        (["train.jsonl"], "lab/asked@test", ["no split test in it", "lab/asked@SPLIT, of train"]),
        (["a/train.jsonl", "b/test.jsonl"], "lab/asked", ["lab/asked:CONFIG, of a, b"]),
        (["a/train.jsonl"], "lab/asked:x", ["lab/asked:CONFIG, of a"]),
        (["a/dev.jsonl"], "lab/asked:a", ["no split train", "lab/asked:a@SPLIT, of validation"]),
        (["data.csv"], "lab/asked", ["`hf download --repo-type dataset lab/asked`"]),
        (["train_a1.jsonl", "train_b1.jsonl"], "lab/asked", ["cannot be read as one"]),
    ],
)
def test_a_split_that_is_not_there_is_refused_with_those_that_are(
    served: FakeHub, files: list[str], value: str, words: list[str]
) -> None:
    data_set(served, *files)
    said = refused(base(f"questions.train={value}"))
    assert said.startswith(f"questions.train = {value!r}: ")
    assert all(word in said for word in words), said


def test_a_known_set_is_the_first_file_that_is_there(
    served: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    served.repositories[f"datasets/{data_sets.REPOSITORY}"] = {"nq/dev.jsonl": ROW}
    (found,) = data_sets.find(["nq"], data_sets.EVAL, "")
    assert (found.data_source, found.split, found.path.read_bytes()) == ("nq", "dev", ROW)
    assert capsys.readouterr().err.startswith("forage: --eval: fetching RUC-NLPIR/")
    with pytest.raises(
        ConfigError, match=r"^--train '.*': no nq/train\.jsonl in it on the Hub: `hf"
    ):
        data_sets.find(["nq"], data_sets.TRAIN, "")


def test_sets_of_one_s_own_are_prepared_by_their_names(served: FakeHub) -> None:
    data_set(served, "en/train.jsonl", "en/dev.jsonl", "de/train.jsonl")
    words = ["--train", "lab/asked:en,de=lab/asked:de@train", "--eval", "lab/asked:en"]
    given = ["data", "prepare", "out", *words, "questions.columns.question=problem"]
    assert cli.main(given) == 0
    train, held_out = (
        pyarrow.parquet.read_table(f"out/{kind}.parquet").to_pylist() for kind in KINDS
    )
    assert [(row["id"], row["question"]) for row in train] == [
        ("asked/train/1", "who?"),
        ("de/train/1", "who?"),
    ]
    assert [(row["id"], row["split"]) for row in held_out] == [("asked/validation/1", "validation")]


def test_a_set_of_one_s_own_that_is_not_there_is_refused_as_in_a_run(
    served: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    data_set(served, "train.jsonl")
    given = ["data", "prepare", "out", "--train", "nq=lab/asked@dev", "--eval", ""]
    assert cli.main(given) == 2
    said = capsys.readouterr().err
    assert said.startswith("forage: --train 'lab/asked@dev': no split validation in it: ")
    assert "lab/asked@SPLIT, of train" in said and not Path("out").exists()


def test_without_a_network_the_sets_to_fetch_are_named_at_once(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point_at(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(ConfigError) as raised:
        data_sets.find(["nq"], data_sets.TRAIN, "")
    fetch = f"`hf download --repo-type dataset {data_sets.REPOSITORY}`"
    assert fetch in str(raised.value) and "set --train to a file in it" in str(raised.value)
    assert capsys.readouterr().err == ""  # of no attempt


def test_a_long_download_is_told_of_without_a_terminal(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "FIRST_S", 0.001)
    hub.model("model.path", "lab/small")
    assert "\nfetching lab/small (0 s)\n" in capsys.readouterr().err


def refused(config: Config) -> str:
    """The line that refuses a configuration's names."""
    with pytest.raises(ConfigError) as raised:
        hub.with_hub_paths(config)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("field", "name", "rest"),
    [
        ("model.path", "données/modèle", ""),
        ("model.path", "lab/" + "a" * 97, ""),
        ("model.path", "a" * 300 + "/model", ""),
        ("questions.train", "données/questions", "@train"),
        ("questions.train", "lab/asked.git", "@train"),
    ],
)
def test_a_path_that_is_not_here_and_no_name_on_the_hub_is_refused_in_a_line(
    served: FakeHub, field: str, name: str, rest: str
) -> None:
    said = refused(base(f"{field}={name}{rest}"))
    assert said.startswith(f"{field} = {name + rest!r}: there is no {Path(name).resolve()}, and")
    assert said.endswith(": name a path as seen from here") and not served.requests


def have_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Have every disk hold no more than so many bytes."""
    usage = shutil._ntuple_diskusage(size, 0, size)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_a_model_that_the_disk_has_no_room_for_is_not_begun(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have_free(monkeypatch, 1_000_000)
    cache = Path(constants.HF_HUB_CACHE)
    assert refused(base("model.path=lab/small")) == (
        f"model.path = 'lab/small': 2.0 MB are needed in {cache}, 1.0 MB are free: make room "
        "there, or set HF_HUB_CACHE"
    )
    assert capsys.readouterr().err == "" and not [*cache.rglob("config.json")]


def test_a_hub_that_ends_while_room_is_reckoned_is_named(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(*_: object, dry_run: bool = False, **__: object) -> str:
        raise DryRunError("503") if dry_run else LocalEntryNotFoundError("none")

    have_free(monkeypatch, 1_000_000)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert "hf download lab/small" in refused(base("model.path=lab/small"))


def test_what_is_cached_already_needs_no_room(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Path(hub.model("model.path", "lab/small"), "tokenizer.json")
    lost.resolve().unlink()
    lost.unlink()
    have_free(monkeypatch, 1_000_000)
    assert Path(hub.model("model.path", "lab/small"), "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        # As hf_xet has it, of the file that it writes and of one before.
        OSError("I/O error: IO Error: No space left on device (os error 28)"),
        RuntimeError("Task error: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_while_a_model_is_fetched_is_named(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail_with(monkeypatch, error)
    assert refused(base("model.path=lab/small")) == (
        f"model.path = 'lab/small': 2.0 MB are needed in {constants.HF_HUB_CACHE} in all: "
        "make room there, or set HF_HUB_CACHE"
    )


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Have the library fail while it writes a file."""

    def http_get(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(file_download, "http_get", http_get)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad disk"), RuntimeError("a defect")])
def test_another_failure_to_write_is_not_taken_for_a_full_disk(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail_with(monkeypatch, error)
    with pytest.raises(type(error)) as raised:
        hub.model("model.path", "lab/small")
    assert raised.value is error


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_the_command_to_fetch_with_is_named(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    monkeypatch.setattr(hub, "_OFFLINE", offline)
    point_at(monkeypatch, "http://127.0.0.1:1")
    said = refused(base("model.path=lab/small"))
    assert "cannot be read (HF_HUB_OFFLINE is set)" in said if offline else "refused" in said
    assert "run `hf download lab/small` where" in said and "set model.path to it" in said
    said = refused(base("questions.eval=lab/asked"))
    assert "`hf download --repo-type dataset lab/asked`" in said
    assert "set questions.eval to a file in it" in said


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Task error: CAS Client Error: HTTP status server error (500)"),
        hf_xet.XetAuthenticationError("Authentication error: no"),
        ConnectionResetError("Network error: reset"),
        ValueError("Xet headers have not been correctly set by the server."),
        OSError("Consistency check failed: file should be of size 2 but has size 1\nWe are sorry"),
    ],
)
def test_a_file_that_does_not_come_is_named(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail_with(monkeypatch, error)
    (why, *_) = str(error).splitlines()
    said = refused(base("model.path=lab/small"))
    assert said.startswith(
        f"model.path = 'lab/small': a file of it has not come from the Hub ({why}): try again; "
    )


@pytest.mark.parametrize("page", [b"<p>Log in to this network", b"<p>Caf\xe9: log in"])
def test_a_page_before_the_network_is_no_hub(served: FakeHub, page: bytes) -> None:
    served.page = page
    said = refused(base("model.path=lab/small"))
    assert "cannot be read (what answers is a page, not the Hub: log in" in said


@pytest.mark.slow
def test_a_store_of_large_files_that_cannot_be_reached_is_named(
    tmp_path: Path, served: FakeHub
) -> None:
    served.store = "http://127.0.0.1:1"
    words = ["-c", "from scripts.setup import hub; hub.model('model.path', 'lab/small')"]
    at_once = {"HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "0"}
    ended = ran(tmp_path, *words, HF_ENDPOINT=served.url, **at_once)
    said = ended.stderr.splitlines()[-1]
    assert "ConfigError: model.path = 'lab/small': a file of it has not come from the Hub (" in said
    assert "error sending request for url (http://127.0.0.1:1/" in said, said
    assert said.endswith("HF_HUB_DISABLE_XET=1 may go around their store")
    assert not [*tmp_path.rglob("*.incomplete"), *tmp_path.rglob("*.safetensors")]
    ended = ran(tmp_path, *words, HF_ENDPOINT=served.url, HF_HUB_DISABLE_XET="1")
    assert [*tmp_path.rglob("*.safetensors")], ended.stderr


def test_the_library_is_as_it_was_afterwards(
    served: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # as `forage ask` sets it for itself
    assert hub.model("model.path", "lab/small")
    assert constants.HF_HUB_OFFLINE is True


def ran(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process with a cache of its own, told of the Hub by nothing but its environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, *words],
        env=clean | {"HF_HOME": str(tmp_path / "home")} | environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_command_that_is_offline_itself_resolves_names_first(
    tmp_path: Path, served: FakeHub
) -> None:
    data_set(served, "train.jsonl")
    words = ["try", "configs/base.yaml", "--say", "x", "model.path=lab/small"]
    words.append("questions.train=lab/asked@dev")
    ended = ran(tmp_path, "-m", "scripts.cli", *words, HF_ENDPOINT=served.url)
    assert ended.returncode == 2 and "lab/asked@SPLIT, of train" in ended.stderr, ended.stderr
    assert "forage: model.path: fetching lab/small" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_user_who_forbids_the_network_is_obeyed(
    tmp_path: Path, served: FakeHub, variable: str
) -> None:
    code = "from scripts.setup import hub; hub.model('model.path', 'lab/small')"
    ended = ran(tmp_path, "-c", code, HF_ENDPOINT=served.url, **{variable: "1"})
    assert "HF_HUB_OFFLINE is set" in ended.stderr and not served.requests
