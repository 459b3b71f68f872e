"""Run directories that somebody else made: each would have who opens it run code, show a secret,
send a request or obey an escape.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, models

from configs.load import parse, save
from learner import checkpoint
from replay.log.format import framed
from replay.log.records import (
    EvaluationFinished,
    GroupDropped,
    GroupOpened,
    LeaseReturned,
    RunResumed,
    Stopped,
)
from replay.protocol import EvalResult
from replay.trajectory import Question
from tests.retrieval_server.encoders import pickled
from tests.scripts.conftest import Exporter, RecordedRun

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"
HIDDEN = "\u202etxt.exe\u2066"
MARKUP = "[/x][link=http://192.0.2.7]see[/link]"
HOSTILE = f"{ESCAPE}{HIDDEN}{MARKUP}"
CODE = "open({canary!r}, 'w').close()\n\n\ndef run(*_, **__):\n    '''It does harm.'''\n"


class Watch:
    """What a hook of the interpreter saw while it was on: connections, looked-up names, secrets."""

    def __init__(self, secret: Path) -> None:
        self.seen: list[str] = []
        self._secret = str(secret)

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(given[1], tuple):
            self.seen.append(f"connects to {given[1]}")
        elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
            self.seen.append(f"looks up {given[0]}")
        elif event == "open" and str(given[0]) == self._secret:
            self.seen.append("reads the secret")


_watches: list[Watch] = []
_hooked: list[bool] = []


@contextmanager
def watching(secret: Path) -> Iterator[Watch]:
    """Watch what this process does inside; a hook cannot be taken off again, so it stays, idle."""
    if not _hooked:
        sys.addaudithook(lambda *event: _watches[-1](*event) if _watches else None)
        _hooked.append(True)
    _watches.append(Watch(secret))
    try:
        yield _watches[-1]
    finally:
        _watches.pop()


@dataclass
class Stranger:
    """A run of a stranger's in `path`, beside what is the user's own in `home`."""

    home: Path
    path: Path
    run: RecordedRun
    said: set[str] = field(default_factory=set)  # the fields that its record sets

    @classmethod
    def made(cls, home: Path) -> "Stranger":
        """A run of two steps with a checkpoint, harmless so far."""
        path = home / "run"
        (path / "model").mkdir(parents=True)
        _write_model(path / "model")
        (home / "q.jsonl").write_text('{"question": "who?", "answers": ["me"]}\n')
        (home / "c.jsonl").write_text('{"id": "1", "contents": "Title\\ntext"}\n')
        (home / "secret").write_text("s3cr3t")
        (home / "secret").chmod(0o600)
        (home / "trap.py").write_text(CODE.format(canary=str(home / "canary")))
        tree = {
            "run_dir": str(path),
            "model": {"path": str(path / "model"), "dtype": "float32", "max_model_len": 256},
            "questions": {"train": str(home / "q.jsonl"), "eval": str(home / "q.jsonl")},
            "retrieval": {"corpus": str(home / "c.jsonl")},
            "replay": {"groups_per_step": 2, "group_size": 2, "max_staleness": 0},
            "learner": {"total_steps": 3},
            "actors": {"kv_cache_bytes": 1_000_000},
        }
        (home / "own.yaml").write_text(yaml.safe_dump(tree))
        config = parse(yaml.safe_dump(tree), (), "a stranger's")
        save(config, path / "config.yaml")
        run = RecordedRun(path, config, 1 << 20)
        run.evaluate(0)
        run.train(0)
        folder = checkpoint.save(config, 1, Exporter(), None)  # type: ignore[arg-type]
        shutil.copytree(path / "model", folder / "model")
        return cls(home, path, run)

    @property
    def others(self) -> dict[Path, bytes]:
        """What the user's own files hold, outside of the run."""
        found = (each for each in self.home.rglob("*") if not each.is_relative_to(self.path))
        return {each: each.read_bytes() for each in found if each.is_file()}

    def says(self, name: str, value: Any) -> None:
        """Have the configuration, the log and the checkpoint say so."""
        tree = yaml.safe_load((self.path / "config.yaml").read_text())
        node, (*sections, last) = tree, name.split(".")
        for section in sections:
            node = node[section]
        node[last] = value
        self.said.add(name)
        (self.path / "config.yaml").write_text(yaml.safe_dump(tree))
        self.run.append(RunResumed(2.0, yaml.safe_dump(tree)))
        manifest = self.path / "checkpoints" / "step-1" / checkpoint.MANIFEST
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"config": tree}))


def _write_model(folder: Path) -> None:
    shape = {
        "hidden_size": 96,
        "max_position_embeddings": 4096,
        "model_type": "trap",
        "architectures": ["Trap"],
    }
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    of_names: dict[str, Any] = dict.fromkeys(names, "modeling_trap.run")
    code = {"auto_map": of_names | {"AutoTokenizer": ["modeling_trap.run", None]}}
    (folder / "config.json").write_text(json.dumps(shape | code))
    (folder / "tokenizer_config.json").write_text(json.dumps(code))
    canary = folder.parent.parent / "canary"
    (folder / "modeling_trap.py").write_text(CODE.format(canary=str(canary)))
    (folder / "model.safetensors").write_bytes(b"0" * 8)
    words = {f"{HOSTILE}{number}": number for number in range(32)}
    Tokenizer(models.WordLevel(words, unk_token=f"{HOSTILE}0")).save(str(folder / "tokenizer.json"))


# ---- what they are made to be


def _field(name: str, value: Any) -> Callable[[Stranger], None]:
    def make(stranger: Stranger) -> None:
        home = str(stranger.home)
        stranger.says(name, value.replace("HOME", home) if isinstance(value, str) else value)

    return make


def shows_its_token(stranger: Stranger) -> None:
    stranger.says("retrieval.url", ["http://127.0.0.1:9"])
    stranger.says("retrieval.token_file", str(stranger.home / "secret"))


def has_a_judge(stranger: Stranger) -> None:
    stranger.says("rewards.weights.judge", 1.0)
    stranger.says("rewards.judge.model", "judge")
    stranger.says("rewards.judge.url", "http://127.0.0.1:9/v1")
    stranger.says("rewards.judge.key_file", str(stranger.home / "secret"))


def rewards_by_code(stranger: Stranger) -> None:
    stranger.says("rewards.weights.custom", 1.0)
    stranger.says("rewards.custom", "trap:run")


def says_it_in_a_checkpoint_alone(stranger: Stranger) -> None:
    stranger.says("model.trust_remote_code", True)
    (stranger.path / "config.yaml").unlink()


def says_it_in_the_log_alone(stranger: Stranger) -> None:
    kept = (stranger.path / "config.yaml").read_text()
    stranger.says("model.trust_remote_code", True)
    stranger.run.resume(1)
    (stranger.path / "config.yaml").write_text(kept)


def writes_yaml_that_runs(stranger: Stranger) -> None:
    canary = stranger.home / "canary"
    text = f"!!python/object/apply:builtins.open [{str(canary)!r}, w]"
    with (stranger.path / "config.yaml").open("a") as file:
        file.write(f"seed2: {text}\n")


def writes_yaml_into_the_log(stranger: Stranger) -> None:
    canary = stranger.home / "canary"
    text = f"seed: !!python/object/apply:builtins.open [{str(canary)!r}, w]\n"
    stranger.run.append(RunResumed(2.0, text))


def pickles_its_weights(stranger: Stranger) -> None:
    bomb = pickled(stranger.home / "canary")
    for folder in (stranger.path / "model", stranger.path / "checkpoints" / "step-1" / "model"):
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(bomb)


def asks_in_escapes(stranger: Stranger) -> None:
    question = Question(f"q{HOSTILE}", f"who {HOSTILE}?", (f"me{HOSTILE}",), 1)
    stranger.run.append(GroupOpened(2.0, 77, "train", question, 1, 0))


def drops_by_markup(stranger: Stranger) -> None:
    stranger.run.append(GroupDropped(2.0, 1, MARKUP), GroupDropped(2.0, 2, HOSTILE))


def returns_by_escapes(stranger: Stranger) -> None:
    stranger.run.append(LeaseReturned(2.0, HOSTILE, 1, 0, f"TokenMismatch {HOSTILE}"))


def stops_by_escapes(stranger: Stranger) -> None:
    stranger.run.append(Stopped(2.0, HOSTILE))


def names_a_key_in_escapes(stranger: Stranger) -> None:
    with (stranger.path / "config.yaml").open("a") as file:
        file.write(f"{json.dumps(HOSTILE)}: 1\n")


def is_damaged(stranger: Stranger) -> None:
    with (stranger.path / "events.log").open("ab") as file:
        file.write(HOSTILE.encode() * 9)


def is_damaged_all_over(stranger: Stranger) -> None:
    """So many gaps among so many files that a look at the folder for each would take minutes."""
    records = (HOSTILE.encode() + framed(b"\x81\xa4type\xa1x", 99 + n) for n in range(3000))
    with (stranger.path / "events.log").open("ab") as file:
        file.write(b"".join(records))
    for number in range(1000):
        (stranger.path / f"other-{number}").touch()


def has_a_folder_of_escapes(stranger: Stranger) -> None:
    moved = stranger.path.with_name(f"run{HOSTILE.replace('/', '_')}")
    stranger.path.rename(moved)
    stranger.path = moved


def links_out(stranger: Stranger) -> None:
    mine = stranger.home / "mine"
    mine.mkdir()
    (mine / "notes").write_text("kept")
    (stranger.path / "curve.png").symlink_to(mine / "notes")
    for name in ("logs", "keys", "relearn-recorded", "tensorboard"):
        (stranger.path / name).symlink_to(mine)


def counts_hops_in_formulas(stranger: Stranger) -> None:
    scores = {f"$\\frac{{{ESCAPE}$": 0.5, "$\\bad$": 0.1}
    result = EvalResult(
        step=0,
        em=0.5,
        em_by_hops=scores,
        sampled_em=None,
        sampled_em_by_hops={},
        searches=1.0,
        questions=2,
        oldest_version=0,
        newest_version=0,
    )
    stranger.run.append(EvaluationFinished(2.0, result))


_ENGINE = {"compilation_config": {"backend": "trap.run"}}
_DRAFT = {"speculative_config": {"method": "draft_model", "model": "/another/model"}}
DECIDES = {  # fields that a record does not decide: refused by name, whoever opens it
    "runs the model's code": _field("model.trust_remote_code", True),
    "is an environment": _field("environment.name", "trap:run"),
    "has a tool": _field("environment.tools", ["trap:run"]),
    "compiles by code": _field("actors.engine", _ENGINE),
    "drafts": _field("actors.engine", _DRAFT),
    "rewards by code": rewards_by_code,
    "shows its token": shows_its_token,
    "has a judge": has_a_judge,
    "has keys": _field("keys", "HOME"),
    "searches elsewhere": _field("retrieval.url", ["http://127.0.0.1:9"]),
    "listens for all": _field("retrieval.host", "0.0.0.0"),
    "binds to a file": _field("replay.endpoint", "ipc://HOME/secret"),
    "binds to a port": _field("replay.endpoint", "tcp://192.0.2.7:5000"),
    "syncs elsewhere": _field("weight_sync.endpoint", "tcp://127.0.0.1:9"),
    "writes elsewhere": _field("weight_sync.snapshot_dir", "HOME"),
    "meets elsewhere": _field("learner.rendezvous", "tcp://192.0.2.7:5000"),
    "joins a cluster": _field("cluster.address", "127.0.0.1:9"),
    "fetches a model": _field("model.path", "strange/model"),
    "fetches an encoder": _field("retrieval.encoder", "strange/encoder"),
    "fetches questions": _field("questions.train", "strange/data@train"),
}
OTHERWISE = {
    "says it in a checkpoint alone": says_it_in_a_checkpoint_alone,
    "says it in the log alone": says_it_in_the_log_alone,
    "writes YAML that runs": writes_yaml_that_runs,
    "writes YAML into the log": writes_yaml_into_the_log,
    "pickles its weights": pickles_its_weights,
    "asks in escapes": asks_in_escapes,
    "drops by markup": drops_by_markup,
    "returns by escapes": returns_by_escapes,
    "stops by escapes": stops_by_escapes,
    "names a key in escapes": names_a_key_in_escapes,
    "names an environment in escapes": _field("environment.name", HOSTILE),
    "is damaged": is_damaged,
    "is damaged all over": is_damaged_all_over,
    "has a folder of escapes": has_a_folder_of_escapes,
    "links out": links_out,
    "counts hops in formulas": counts_hops_in_formulas,
}
STRANGERS = DECIDES | OTHERWISE
