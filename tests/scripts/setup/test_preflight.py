"""Bad input is refused before any process starts: field, value and remedy."""

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from configs.devices import on_cpu
from configs.load import ConfigError, parse, save
from configs.runtime.process import REPOSITORY, most_descriptors
from configs.schema import Config
from replay.log.history import Searched
from replay.questions import left_out
from replay.trajectory import Question, Search
from scripts import cli
from scripts.fleet import launch
from scripts.setup import gpu_memory, learning, preflight
from scripts.setup.resolve import resolve
from tests.replay.conftest import record_searches
from tests.retrieval_server.conftest import CONTENTS, serving

BOTH = {"model": True, "retrieval": True}


@pytest.fixture
def good(tmp_path: Path, inputs: dict[str, str]) -> dict[str, str]:
    """Overrides of a configuration without a problem."""
    return inputs | {"run_dir": str(tmp_path / "run")}


def config(overrides: dict[str, str]) -> Config:
    """The schema's defaults with these overrides."""
    return parse("", [f"{k}={v}" for k, v in overrides.items()], "the schema's defaults")


def test_a_good_configuration_passes(good: dict[str, str]) -> None:
    preflight.check(config(good))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"learner.best": "judge"}, "do not score it: rewards.evaluated=judge"),
        ({"learner.best": "nq/em"}, "no data set 'nq', none that is named (data_source)"),
        (
            {"learner.best": "nq/em", "questions.eval": "SETS"},
            "questions.eval has no data set 'nq', only a, other: name another",
        ),
    ],
)
def test_a_best_that_no_evaluation_tells_is_refused(
    good: dict[str, str], changed: dict[str, str], words: str
) -> None:
    sets = Path(good["questions.eval"]).with_name("sets.jsonl")
    rows = [{"question": "?", "answers": ["a"], "data_source": name} for name in ("a", "")]
    sets.write_text("\n".join(map(json.dumps, rows)))
    named = {field: str(sets) if value == "SETS" else value for field, value in changed.items()}
    with pytest.raises(ConfigError) as raised:
        preflight.check(config(good | named))
    assert str(raised.value).startswith("learner.best = ") and words in str(raised.value)
    told = {"questions.eval": str(sets), "learner.best": "other/f1"}
    preflight.check(config(good | told))


def test_a_tracker_whose_package_is_absent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    named = config({"learner.trackers": "[tensorboard, wandb, trackio]"})
    monkeypatch.setattr(learning.importlib.util, "find_spec", lambda name: None)
    told = list(learning.trackers(named))
    assert [line.split("is not installed here: ")[1].split(" -m ")[1] for line in told] == [
        f"pip install {name}, or leave it out" for name in ("wandb", "trackio")
    ]
    assert list(learning.trackers(config({}))) == []
    (nameless,) = learning.trackers(config({"learner.tracker_project": "' '"}))
    assert nameless.startswith("learner.tracker_project = ' ' is no name")


def test_rows_that_cannot_be_used_are_said_before_the_start(good: dict[str, str]) -> None:
    assert list(left_out(config(good))) == []
    with Path(good["questions.train"]).open("a") as file:
        file.write('{"question": "who?", "answers": []}\n')
    preflight.check(config(good))
    said = list(left_out(config(good | {"questions.eval_limit": "1"})))
    assert len(said) == 2, "of both files, of one of which the first row alone is asked"
    for line, field in zip(said, ("questions.train", "questions.eval"), strict=True):
        assert line.startswith(f"{field}: left out, 1 of 2 rows cannot be used: ")
        assert "q.jsonl:2: answers is []" in line


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model.path", "", "model.path is empty"),
        ("model.path", "/no/such/model", "/no/such/model"),
        ("questions.train", "", "questions.train is empty"),
        (
            "questions.eval",
            "/no/such.jsonl",
            "questions.eval = '/no/such.jsonl': no file there: name a JSONL",
        ),
        ("retrieval.corpus", "/no/such.jsonl", "retrieval.corpus = '/no/such.jsonl'"),
        ("retrieval.token_file", "/no/such", "retrieval.token_file = '/no/such': No such file"),
        ("model.max_model_len", "8192", "max_position_embeddings 4096"),
        ("actors.kv_cache_bytes", str(1 << 50), "too little memory"),
        ("actors.max_turns", "1024", "actors.max_turns = 1024: a record holds 1024 turns"),
        ("model.max_model_len", "2000000", "takes up to 22.9 MiB, and a message holds 16"),
        ("replay.groups_per_step", "100000000", "replay.groups_per_step = 100000000, replay.group"),
    ],
)
def test_each_problem_is_named(good: dict[str, str], field: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        preflight.check(config(good | {field: value}))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "no config.json; name a Hugging Face folder"),
        ("model.safetensors", "no *.safetensors there; save the model with"),
        ("tokenizer.json", "no tokenizer; save it beside the model"),
    ],
)
def test_what_trains_nothing_still_needs_a_whole_model(
    good: dict[str, str], name: str, words: str
) -> None:
    untrained = good | {"questions.train": "", "questions.eval": ""}
    preflight.check_rollouts(config(untrained))
    (Path(good["model.path"]) / name).unlink()
    with pytest.raises(ConfigError) as raised:
        preflight.check_rollouts(config(untrained))
    assert words in str(raised.value)


def test_more_actors_than_replay_may_hold_sockets_are_refused(good: dict[str, str]) -> None:
    hard = most_descriptors()
    count = (hard - preflight.OTHER_DESCRIPTORS) // 2
    assert not list(preflight._descriptors(config(good | {"actors.count": str(count)})))
    (told,) = preflight._descriptors(config(good | {"actors.count": str(count + 1)}))
    assert f"a process here may open {hard}: raise the hard limit (ulimit -Hn" in told


def test_without_searches_no_corpus_is_needed(good: dict[str, str]) -> None:
    without = config(good | {"retrieval.corpus": ""})
    preflight.check_rollouts(without, searches=False)
    with pytest.raises(ConfigError, match=r"retrieval\.corpus is empty"):
        preflight.check_rollouts(without)


@pytest.fixture
def short_of_memory(good: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """short_of_memory(**fields): what is said of the good configuration where none is free."""

    def said(fields: dict[str, str]) -> str:
        tree = {"hidden_size": 576, "num_hidden_layers": 30, "max_position_embeddings": 4096}
        (Path(good["model.path"]) / "config.json").write_text(json.dumps(tree))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
        with pytest.raises(ConfigError) as raised:
            preflight.check(config(good | fields))
        return str(raised.value)

    return said


def test_the_terms_of_the_memory_add_up(short_of_memory: Callable[..., str]) -> None:
    said = short_of_memory({"actors.kv_cache_bytes": str(1 << 30)})
    total, free, *terms = map(float, re.findall(r"(\d+\.\d\d)\b", said))
    assert free == 1.0 and total == pytest.approx(sum(terms)) and len(terms) == 6
    assert "its activations (learner.micro_batch_tokens = 16384) 16.26, " in said


def test_only_what_can_be_lowered_is_advised(short_of_memory: Callable[..., str]) -> None:
    sizes = "actors.kv_cache_bytes, learner.micro_batch_tokens, learner.logprob_chunk_bytes"
    least = short_of_memory({"actors.kv_cache_bytes": str(1 << 30), "actors.count": "1"})
    assert least.endswith(f"lower {sizes} or name a smaller model.path")
    most = short_of_memory({"actors.kv_cache_bytes": str(1 << 30), "learner.ranks": "3"})
    assert most.endswith(f"lower actors.count, learner.ranks, {sizes} or name a smaller model.path")


def test_memory_keeps_nobody_from_printing_the_commands(
    good: dict[str, str], tmp_path: Path
) -> None:
    save(config(good | {"actors.kv_cache_bytes": str(1 << 50)}), tmp_path / "big.yaml")
    assert cli.main(["train", str(tmp_path / "big.yaml"), "--prepare-only"]) == 0


BLOCK = 128 if on_cpu() else 16  # tokens of keys and values
SMALL = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "use_sliding_window": False,
}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({}, "actors.kv_cache_bytes = 1000000: one context of model.max_model_len = 4096 tokens "),
        ({}, f"takes {12288 * (4096 + BLOCK)} (12288 a token, whole blocks of {BLOCK} and one "),
        ({"head_dim": 128}, f"takes {24576 * (4096 + BLOCK)} (24576 a token, whole"),
        ({"architectures": ["BertForMaskedLM"]}, "its architectures ['BertForMaskedLM'] generate"),
        (
            {"num_experts": 8},
            "a mixture of 8 experts in each layer: weights reach a running engine",
        ),
        ({"text_config": SMALL | {"n_routed_experts": 64}}, "a mixture of 64 experts"),
        ({"use_sliding_window": True}, ""),
        ({"layer_types": ["linear_attention", "full_attention"]}, ""),
        ({"kv_lora_rank": 512}, ""),
        ({"num_key_value_heads": None}, ""),
    ],
)
def test_a_model_that_could_not_be_served_is_refused(
    good: dict[str, str], tree: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 << 30))
    (Path(good["model.path"]) / "config.json").write_text(json.dumps(SMALL | tree))
    if not words:
        preflight.check(config(good))
        return
    with pytest.raises(ConfigError) as raised:
        preflight.check(config(good))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("dtype", "kind", "of_token"),
    [("float32", "auto", 24576), ("bfloat16", "auto", 12288), ("float32", "fp8", 6144),
     ("bfloat16", "fp8_e5m2", 6144), ("float32", "bfloat16", 12288)],
)  # fmt: skip
def test_a_quantised_cache_holds_more_contexts(
    good: dict[str, str], dtype: str, kind: str, of_token: int
) -> None:
    (Path(good["model.path"]) / "config.json").write_text(json.dumps(SMALL))
    asked = good | {"actors.engine.kv_cache_dtype": kind, "actors.dtype": dtype}
    needed = of_token * (4096 + BLOCK)
    preflight.check_rollouts(config(asked | {"actors.kv_cache_bytes": str(needed)}))
    with pytest.raises(ConfigError) as raised:
        preflight.check_rollouts(config(asked | {"actors.kv_cache_bytes": str(needed - 1)}))
    assert f"actors.kv_cache_bytes = {needed - 1}: one context of" in str(raised.value)
    assert f"takes {needed} ({of_token} a token, " in str(raised.value)


@pytest.mark.parametrize(
    ("length", "block", "blocks"),
    [(4096, 16, 257), (4097, 16, 258), (4096, 256, 17), (100, 256, 2)],
)
def test_a_context_takes_whole_blocks_and_one_that_vllm_keeps(
    good: dict[str, str], length: int, block: int, blocks: int
) -> None:
    (Path(good["model.path"]) / "config.json").write_text(json.dumps(SMALL))
    asked = {"actors.engine.block_size": str(block), "model.max_model_len": str(length)}
    with pytest.raises(ConfigError) as raised:
        preflight.check_model(config(good | asked | {"actors.kv_cache_bytes": "1"}))
    assert f"takes {12288 * block * blocks} (" in str(raised.value)


def test_an_argument_of_the_engines_own_is_checked_wherever_an_engine_is_started(
    good: dict[str, str],
) -> None:
    wrong = config(good | {"actors.engine.kv_cache_dtyp": "fp8"})
    checks: list[Callable[[], None]] = [
        partial(preflight.check, wrong),
        partial(preflight.check_machine, wrong),
        partial(preflight.check_rollouts, wrong),
        partial(preflight.check_parts, wrong, **BOTH),
    ]
    for check in checks:
        with pytest.raises(ConfigError, match=r"did you mean actors\.engine\.kv_cache_dtype\?"):
            check()


@pytest.mark.parametrize(
    ("gpus", "workers", "cache", "words"),
    [
        ([], 4, 1 << 30, ""),  # on a CPU workers share it
        ([8, 8], 2, 1 << 30, ""),
        ([8], 2, 1 << 30, "actors.tensor_parallel = 2: 1 GPU is visible here, and each worker nee"),
        ([8, 8], 4, 1 << 30, "2 GPUs are visible here, and each worker needs one: lower it to at "),
        ([8], 1, 9 << 30, "too little memory on a GPU: GPU 0: about 11.5 of 8.0 GiB: engine 11.5 "),
        ([8, 80], 1, 9 << 30, ""),
        ([8, 80], 2, 30 << 30, "of 8.0 GiB: engine 17.5 "),
    ],
)
def test_an_engine_alone_needs_its_gpus_and_room_on_them(
    good: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[int],
    workers: int,
    cache: int,
    words: str,
) -> None:
    monkeypatch.setattr(gpu_memory, "totals", lambda: [size << 30 for size in gpus])
    model = SMALL | {"num_attention_heads": 16, "num_key_value_heads": 4}
    (Path(good["model.path"]) / "config.json").write_text(json.dumps(model))
    fields = {"actors.tensor_parallel": str(workers), "actors.kv_cache_bytes": str(cache)}
    alone = config(good | fields | {"learner.ranks": "8"})  # of which it has nothing
    if not words:
        preflight.check_rollouts(alone)
        return
    with pytest.raises(ConfigError) as raised:
        preflight.check_rollouts(alone)
    assert words in str(raised.value)


SHARED = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 60,
}
SHARES = [
    (2, {}, ""),
    (4, {}, ""),  # two workers have a copy of each head of keys and values
    (3, {}, "num_attention_heads 4, num_key_value_heads 2, vocab_size, padded to 64 cannot be sha"),
    (4, {"num_key_value_heads": 3}, "the model's num_key_value_heads 3 cannot be shared out"),
    (2, {"intermediate_size": 95}, "the model's intermediate_size 95 cannot be shared out evenly"),
]


@pytest.mark.parametrize(("workers", "tree", "words"), SHARES)
def test_what_workers_cannot_share_out_is_refused(
    good: dict[str, str], workers: int, tree: dict[str, Any], words: str
) -> None:
    model = SMALL | SHARED | tree
    (Path(good["model.path"]) / "config.json").write_text(json.dumps(model))
    shared = config(
        good | {"actors.tensor_parallel": str(workers), "actors.kv_cache_bytes": str(1 << 30)}
    )
    if not words:
        preflight.check_model(shared)
        return
    with pytest.raises(ConfigError) as raised:
        preflight.check_model(shared)
    assert str(raised.value).startswith(f"actors.tensor_parallel = {workers}: the model's ")
    assert words in str(raised.value)


def test_a_context_takes_more_where_workers_hold_copies(good: dict[str, str]) -> None:
    model = SMALL | {"num_attention_heads": 12, "num_key_value_heads": 1}
    (Path(good["model.path"]) / "config.json").write_text(json.dumps(model))
    needs = []
    for workers in (1, 4):
        with pytest.raises(ConfigError) as raised:
            few = {"actors.tensor_parallel": str(workers), "actors.kv_cache_bytes": "1"}
            preflight.check_model(config(good | few))
        needs.append(int(re.findall(r"tokens takes (\d+) \(", str(raised.value))[0]))
    assert needs[1] == 4 * needs[0]


@pytest.mark.parametrize("length", [4, 23])
def test_a_context_without_room_for_a_whole_action_is_refused(
    good: dict[str, str], word_tokenizer: Any, length: int
) -> None:
    word_tokenizer.save_pretrained(good["model.path"])
    asked = {"questions.prompt": "'what is the {question}'", "actors.max_action_tokens": "20"}
    preflight.check(config(good | asked | {"model.max_model_len": "24"}))
    with pytest.raises(ConfigError) as raised:
        preflight.check(config(good | asked | {"model.max_model_len": str(length)}))
    assert str(raised.value).startswith(
        f"model.max_model_len = {length}: the prompt of the shortest question takes 4 tokens and "
        "an action up to actors.max_action_tokens = 20: give at least 24, lower"
    )


def test_a_group_of_one_is_refused_where_it_would_be_trained(good: dict[str, str]) -> None:
    alone = good | {"replay.group_size": "1"}
    with pytest.raises(ConfigError, match=r"replay\.group_size = 1: .*: give 2 or more"):
        preflight.check(config(alone))
    preflight.check(config(alone | {"learner.total_steps": "0"}))
    with pytest.raises(ConfigError, match=r"baseline = 'leave_one_out': .* no sibling is left"):
        preflight.check(config(alone | {"learner.baseline": "leave_one_out"}))
    against_all = {"learner.baseline": "none", "learner.advantage_std": "whiten"}
    preflight.check(config(alone | against_all))
    with pytest.raises(ConfigError, match=r"drop_no_signal = True with learner.baseline = 'none'"):
        preflight.check(config(good | against_all | {"replay.drop_no_signal": "true"}))
    by_kl = {"learner.kl_in": "reward", "learner.kl_coef": "0.1", "learner.anchor": "frozen"}
    with pytest.raises(ConfigError, match=r"drop_no_signal = True with learner.kl_in = 'reward'"):
        preflight.check(config(good | by_kl | {"replay.drop_no_signal": "true"}))
    judged = alone | {"learner.baseline": "critic", "learner.advantage_std": "whiten"}
    preflight.check(config(judged))
    with pytest.raises(ConfigError, match=r"replay\.drop_no_signal = True .*: set it to false"):
        preflight.check(config(judged | {"replay.drop_no_signal": "true"}))


def test_what_is_set_of_rollbacks_may_stay_where_a_run_goes_on(good: dict[str, str]) -> None:
    idle = good | {"sentinels.rollbacks": "9"}
    with pytest.raises(ConfigError, match=r"sentinels\.rollbacks = 9 acts on nothing"):
        preflight.check(config(idle))
    preflight.check(config(idle), resumed=True)  # its `ess` was 'rollback' before
    preflight.check(config(idle | {"sentinels.ess": "rollback"}))


@pytest.mark.parametrize("action", ["warn", "stop", "rollback"])
def test_a_sentinel_that_nothing_sets_off_is_to_do_nothing(
    good: dict[str, str], action: str
) -> None:
    asked = good | {"sentinels.no_signal": action}
    preflight.check(config(asked))
    alone = asked | {"learner.baseline": "none", "learner.advantage_std": "whiten"}
    if action == "warn":
        preflight.check(config(alone))
    else:
        with pytest.raises(ConfigError, match=rf"no_signal = '{action}' acts on nothing .*'none'"):
            preflight.check(config(alone))


@pytest.mark.parametrize(
    ("outcome", "logged", "said"),
    [
        ("failed", True, True),
        ("interrupted", True, True),
        ("completed", True, False),
        ("failed", False, False),
    ],
)
def test_how_to_go_on_is_said_where_a_run_can(
    tmp_path: Path, outcome: str, logged: bool, said: bool
) -> None:
    if logged:
        (tmp_path / "events.log").touch()
    command = f"forage resume {tmp_path}"
    assert launch.how_to_go_on(Config(run_dir=str(tmp_path)), outcome) == (command if said else "")


def test_a_malformed_line_is_located(good: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('\n{"question": 3}\n')
    (tmp_path / "c.jsonl").write_text('{"id": "1"}\n')
    with pytest.raises(ConfigError) as raised:
        preflight.check(config(good))
    questions, _, corpus = str(raised.value).splitlines()
    assert "line 2: " in questions and questions.count("q.jsonl") == 1
    assert "line 1: " in corpus and corpus.count("c.jsonl") == 1


def test_a_port_in_use_is_refused(good: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"retrieval.port = {port}"):
            preflight.check(config(good | {"retrieval.port": port}))


@pytest.fixture
def web_server() -> Iterator[str]:
    """The URL of a server that is no retrieval server."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_a_retrieval_server_that_nobody_listens_for_is_refused_at_once(
    good: dict[str, str], tmp_path: Path
) -> None:
    dead = good | {"retrieval.url": "http://127.0.0.1:1"}
    words = r"retrieval\.url = 'http://127\.0\.0\.1:1': no retrieval server can be reached"
    with pytest.raises(ConfigError, match=words):
        preflight.check(config(dead))
    preflight.check(config(dead), here=False)
    preflight.check(config(dead | {"retrieval.top_k": "0"}))
    saved = tmp_path / "saved.yaml"
    save(config(dead), saved)
    assert cli.main(["train", str(saved), "--prepare-only"]) == 0
    assert cli.main(["sync", str(saved), f"run_dir={tmp_path / 'sync'}"]) == 2


def test_a_server_that_is_no_retrieval_server_is_refused(
    good: dict[str, str], web_server: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"search at retrieval.url = '{web_server}' failed: .*501"
    ):
        preflight.check(config(good | {"retrieval.url": web_server}), resumed=True)


def test_each_server_of_a_list_must_answer(good: dict[str, str], web_server: str) -> None:
    with serving() as url:
        servers = f"[{url},http://127.0.0.1:1,{web_server}]"
        with pytest.raises(ConfigError) as raised:
            preflight.check(config(good | {"retrieval.url": servers}))
    dead, other = str(raised.value).splitlines()
    assert dead.startswith("retrieval.url = 'http://127.0.0.1:1': no retrieval server can be")
    assert dead.endswith("start it first, or leave it out")
    assert other.startswith(f"a search at retrieval.url = '{web_server}' failed: ")


def test_servers_of_a_list_must_serve_one_index(good: dict[str, str], tmp_path: Path) -> None:
    path = str(tmp_path / "saved.yaml")
    save(config(good), Path(path))
    with serving() as one, serving() as same, serving(contents=CONTENTS[:2]) as other:
        checked = preflight.checked(path, [f"retrieval.url=[{one},{same}]"])
        version = httpx.get(f"{one}/info", trust_env=False).json()["index_version"]
        assert checked.retrieval.index_version == version
        assert preflight.checked(path, [f"retrieval.url={one}"]).retrieval.index_version == ""
        said = f"they serve different indexes .{one} '{version}', {other} '"
        with pytest.raises(ConfigError, match=said):
            preflight.checked(path, [f"retrieval.url=[{one},{other}]"])


def test_a_run_directory_in_use_is_kept(good: dict[str, str]) -> None:
    kept = Path(good["run_dir"]) / "events.log"
    kept.parent.mkdir()
    kept.write_text("precious")
    with pytest.raises(ConfigError, match="in use by another run"):
        preflight.check(config(good))
    assert kept.read_text() == "precious"


def test_a_run_directory_with_something_else_in_it_is_kept(good: dict[str, str]) -> None:
    folder = Path(good["run_dir"])
    folder.mkdir()
    for name in ("a.csv", "b.csv", "notes.txt", "old"):
        (folder / name).touch()
    with pytest.raises(ConfigError) as raised:
        preflight.check(config(good))
    assert str(raised.value) == (
        f"run_dir = {str(folder)!r}: it holds 'a.csv', 'b.csv', 'notes.txt' and 1 more, which are "
        "no run's: name a new or empty directory, or move them away"
    )


def test_a_run_directory_that_nobody_can_make_is_refused(good: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="run_dir = '/proc/x': '/proc' cannot be written"):
        preflight.check(config(good | {"run_dir": "/proc/x"}))


def test_a_run_directory_that_can_be_made_is_left_to_the_run(good: dict[str, str]) -> None:
    preflight.check(config(good))
    above = Path(good["run_dir"]).parent
    assert not [each for each in above.iterdir() if each.name.startswith((".forage", "run"))]


def test_the_command_exits_2_with_the_message(
    good: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(REPOSITORY / "configs" / "base.yaml")
    assert cli.main(["train", base, "learner.lrr=1"]) == 2
    assert "did you mean 'learner.lr'" in capsys.readouterr().err
    assert cli.main(["train", base, "model.path=/no/such/model"]) == 2
    assert "/no/such/model" in capsys.readouterr().err


def test_prepare_only_prints_commands_that_name_the_run(
    good: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"{k}={v}" for k, v in {**good, "actors.count": "2"}.items()]
    assert (
        cli.main(["train", str(REPOSITORY / "configs" / "base.yaml"), *overrides, "--prepare-only"])
        == 0
    )
    printed = capsys.readouterr().out
    assert printed.count(f"{good['run_dir']}/config.yaml") == 5
    assert "actors.worker" in printed and "--actor-id actor-1" in printed
    comments, commands = (
        [line for line in printed.splitlines() if line.startswith("#") == each]
        for each in (True, False)
    )
    assert "in this order, each in a terminal of its own" in comments[0]
    assert commands[0] == f"cd {REPOSITORY}"
    assert commands[1].startswith("export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false")
    workers = [line.split("-m ")[1].split(".")[0] for line in commands[2:]]
    assert workers == ["retrieval_server", "replay", "learner", "actors", "actors"]


@pytest.mark.parametrize(
    ("start", "final", "said"),
    [
        (None, None, "nothing was evaluated, 3 steps"),
        (0.0, None, "EM 0.0 -> not evaluated, 3 steps"),
        (None, 0.5, "EM not evaluated -> 0.5, 3 steps"),
        (0.0, 0.5, "EM 0.0 -> 0.5, 3 steps"),
    ],
)
def test_what_was_not_evaluated_is_said(
    start: float | None, final: float | None, said: str
) -> None:
    assert launch.outcome_of({"em_start": start, "em_final": final, "steps": 3}) == said


def test_every_rank_of_the_learner_has_its_own_process(good: dict[str, str]) -> None:
    commands = launch.commands(config(good | {"learner.ranks": "3"}))
    ranks = {name: command[3:] for name, command in commands.items() if "learner" in name}
    assert ranks == {"learner": [], "learner-1": ["--rank", "1"], "learner-2": ["--rank", "2"]}


@pytest.fixture
def recorded(good: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Overrides that name a recorded run, which searched the good configuration's corpus."""
    search = Search("who?", ("1",), 0.1, "ok")
    made = Searched(1.0, "actor", "train", Question("q", "who?", ()), 1, 0, 0, ((search,),))
    run = record_searches(tmp_path / "recorded", config(good), made)
    return good | {"retrieval.recorded": str(run), "retrieval.corpus": ""}


def test_a_recorded_run_answers_and_no_server_is_started(recorded: dict[str, str]) -> None:
    made = resolve(config(recorded), "again")
    preflight.check(made)
    assert made.retrieval.port == 0
    assert "retrieval_server" in launch.commands(config(recorded | {"retrieval.recorded": ""}))
    assert "retrieval_server" not in launch.commands(made)


def test_a_recorded_run_that_cannot_answer_is_refused(
    recorded: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "other.jsonl").write_text('{"id": "2", "contents": "other"}\n')
    with pytest.raises(ConfigError, match=r"other.jsonl' does not hold passages '1'"):
        preflight.check(config(recorded | {"retrieval.corpus": str(tmp_path / "other.jsonl")}))


def test_a_recorded_run_is_named_absolutely(
    recorded: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latest").symlink_to("recorded")  # it will point elsewhere once the run begins
    made = resolve(config(recorded | {"retrieval.recorded": "latest"}), "again")
    assert made.retrieval.recorded == str(tmp_path / "recorded")


JUDGED = {
    "rewards.weights.judge": "1",
    "rewards.judge.url": "http://127.0.0.1:1/v1",
    "rewards.judge.model": "m",
}


def test_a_judge_need_not_be_there_yet(good: dict[str, str]) -> None:
    preflight.check(config(good | JUDGED))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (JUDGED | {"rewards.judge.key_file": "/no/key"}, ["rewards.judge.key_file = '/no/key'"]),
        (JUDGED | {"rewards.judge.timeout_s": "500"}, ["rewards.judge.timeout_s = 500", "240"]),
        (
            {"rewards.weights.similarity": "1", "rewards.similarity.model": "/no/encoder"},
            ["rewards.similarity.model = '/no/encoder'", "config.json"],
        ),
        (
            {"rewards.weights.custom": "1", "rewards.custom": "no_such:reward"},
            ["rewards.custom = 'no_such:reward'", "No module named 'no_such'"],
        ),
        (
            {"rewards.weights.custom": "1", "rewards.custom": "json:dumps"}
            | {"rewards.custom_timeout_s": "120"},
            ["rewards.custom_timeout_s = 120.0 twice", "actors.rollout_deadline_s"],
        ),
    ],
)
def test_rewards_that_cannot_be_given_are_named(
    good: dict[str, str], asked: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        preflight.check(config(good | asked))
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return t.answers", r"raised AttributeError: .*answers.* \(my_reward\.py:2\)"),
        ("return 'much'", "returned 'much', which is no finite number"),
        ("return float(t.answer in t.question.answers and t.searches[0].query == 'who?')", ""),
    ],
)
def test_a_reward_of_one_s_own_is_tried_before_the_start(
    good: dict[str, str],
    body: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "my_reward.py").write_text(f"def reward(t):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    asked = config(good | {"rewards.weights.custom": "1", "rewards.custom": "my_reward:reward"})
    if not words:
        preflight.check(asked)
        return
    said = rf"rewards\.custom = 'my_reward:reward': tried on a made-up rollout, .*{words}"
    with pytest.raises(ConfigError, match=said):
        preflight.check(asked)


def test_what_rewards_need_is_named_absolutely(
    good: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = JUDGED | {"rewards.judge.key_file": "key"}
    asked |= {"rewards.weights.similarity": "1", "rewards.similarity.model": "encoder"}
    made = resolve(config(good | asked), "named").rewards
    assert made.judge.key_file == str(tmp_path / "key")
    assert made.similarity.model == str(tmp_path / "encoder")
    assert resolve(config(good), "plain").rewards == config(good).rewards


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["environment.name=no.such:Thing"], "environment.name = 'no.such:Thing': no.such cannot"),
        (["environment.tools=['tests.actors.faulty_tools:search']"], "its name 'search' is taken"),
        (
            ["environment.name=rag", "environment.tell_budget=true"],
            "environment.tell_budget = True",
        ),
        (["environment.name=tool_call"], "no usable tokenizer there"),
        (["environment.name=tool_call", "questions.chat_template=false"], "set it to true"),
    ],
)
def test_an_environment_that_could_not_be_made_is_refused(
    good: dict[str, str], overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        preflight.check(config(good | dict(each.split("=", 1) for each in overrides)))
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_who_never_searches_needs_no_corpus_and_no_server(good: dict[str, str]) -> None:
    alone = config(good | {"retrieval.corpus": "", "environment.name": "no_search"})
    preflight.check(alone)
    assert "retrieval_server" not in launch.commands(alone)
    assert "retrieval_server" in launch.commands(config(good | {"environment.name": "rag"}))


@pytest.mark.parametrize(
    "check", [preflight.check, preflight.check_rollouts, partial(preflight.check_parts, **BOTH)]
)
def test_a_missing_chat_template_is_refused(
    good: dict[str, str], word_tokenizer: Any, check: Callable[[Config], None]
) -> None:
    word_tokenizer.save_pretrained(good["model.path"])
    check(config(good))
    with pytest.raises(ConfigError, match="its tokenizer has no chat template"):
        check(config(good | {"environment.name": "tool_call"}))


def test_a_tokenizer_alone_is_looked_at_too(
    good: dict[str, str], word_tokenizer: Any, tmp_path: Path
) -> None:
    word_tokenizer.save_pretrained(tmp_path / "tokenizer")
    other = {"environment.name": "tool_call", "model.path": str(tmp_path / "tokenizer")}
    with pytest.raises(ConfigError, match="its tokenizer has no chat template"):
        preflight.check_parts(config(good | other), model=False, retrieval=False)


LIVE = {
    "retrieval.kind": "serper",
    "retrieval.corpus": "",
    "retrieval.live.price_usd": "0.001",
    "retrieval.live.budget_usd": "1",
    "retrieval.live.key_variable": "A_KEY_OF_THE_TEST",
}


def test_the_live_web_needs_no_corpus_but_a_key(
    good: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"^retrieval\.live\.key_variable names no variable"):
        preflight.check(config(good | LIVE))
    monkeypatch.setenv("A_KEY_OF_THE_TEST", "0123456789abcdef")
    preflight.check(config(good | LIVE))


def test_one_server_of_a_cluster_spends_the_budget(good: dict[str, str]) -> None:
    asked = config(good | LIVE | {"cluster.address": "auto"})
    with pytest.raises(ConfigError) as raised:
        preflight.check(asked, here=False)
    said = str(raised.value)
    assert "cluster.retrieval_replicas = 1 with retrieval.kind = 'serper'" in said
    assert "retrieval.live.key_variable with cluster.address" in said


def test_a_program_that_is_not_there_is_refused_before_the_start(good: dict[str, str]) -> None:
    program = {"environment.name": "program", "environment.program.command": "[no-such-agent]"}
    with pytest.raises(ConfigError) as raised:
        preflight.check(config(good | program))
    said = "environment.program.command = 'no-such-agent': there is no such program: install it"
    assert str(raised.value).startswith(said)
    preflight.check(config(good | program | {"environment.program.command": "[python3]"}))
