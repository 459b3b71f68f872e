"""Configuration: overrides, types, and errors that name field, value and remedy."""

import re
from pathlib import Path

import msgspec
import pytest

from configs.load import (
    CHANGEABLE_FIELDS,
    FIELDS,
    MAY_DIFFER,
    ConfigError,
    differences,
    dump,
    load,
    marked,
    parse,
    retrieval_urls,
    save,
)
from configs.runtime.process import REPOSITORY
from configs.schema import LearnerConfig, WeightSyncConfig
from configs.section import INPUT_PATH
from configs.sentinels import SentinelsConfig

LAUGHS = "\n".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))
KL = "kl_coef: 0.1, anchor: ema"


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    """A file with one difference from the defaults."""
    path = tmp_path / "a.yaml"
    path.write_text("learner:\n  lr: 1e-6\n")
    return path


def test_exponent_without_a_dot_is_a_number(yaml_file: Path) -> None:
    assert load(yaml_file).learner.lr == 1e-6
    assert load(yaml_file, ["learner.lr=5e-4"]).learner.lr == 5e-4


def test_overrides_win_and_types_are_kept(yaml_file: Path) -> None:
    config = load(yaml_file, ["learner.lr=0", "replay.drop_no_signal=true", "seed=7"])
    assert (config.learner.lr, config.replay.drop_no_signal, config.seed) == (0.0, True, 7)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("replay.group_sizee=3", ["replay.group_sizee", "3", "replay.group_size"]),
        ("actors.count=many", ["actors.count", "many", "int"]),
        ("learner.lr=-1", ["learner.lr", "-1", ">= 0"]),
        ("model.dtype=fp8", ["model.dtype", "fp8", "bfloat16"]),
        ("learner.objective=ppo", ["learner.objective", "ppo", "'grpo'", "'cispo'"]),
        ("learner.kl_estimator=k9", ["learner.kl_estimator", "k9", "'k3++'"]),
        ("learner.kl_coef=0.1", ["learner.kl_coef", "0.1", "learner.anchor"]),
        ("learner.kl_top_k=8", ["learner.kl_top_k = 8 acts on nothing", "kl_coef = 0.0"]),
        ("learner={anchor: ema, kl_top_k: 8}", ["kl_top_k = 8 acts on nothing", "kl_coef = 0.0"]),
        ("learner={kl_coef: 0.1, kl_top_k: 8}", ["kl_coef = 0.1 needs an anchor"]),
        ("learner.kl_in=reward", ["learner.kl_in = 'reward' acts on nothing", "kl_coef = 0.0"]),
        ("learner.kl_estimator=k2", ["learner.kl_estimator = 'k2' acts on nothing"]),
        (
            f"learner={{{KL}, kl_estimator: k1}}",
            ["learner.kl_estimator = 'k1'", "'k3++'", "kl_top_k"],
        ),
        (f"learner={{{KL}, kl_tail: false}}", ["kl_tail = False acts on nothing", "kl_top_k = 0"]),
        (f"learner={{{KL}, kl_direction: forward}}", ["kl_direction = 'forward' acts on nothing"]),
        (f"learner={{{KL}, kl_gradient: ema_pg}}", ["kl_gradient = 'ema_pg' acts on nothing"]),
        (f"learner={{{KL}, kl_top_k: 8, kl_estimator: k2}}", ["kl_estimator", "kl_top_k = 8"]),
        (f"learner={{{KL}, kl_in: reward, kl_top_k: 8}}", ["kl_top_k = 8", "kl_in = 'reward'"]),
        (f"learner={{{KL}, kl_in: reward, kl_weight: none}}", ["kl_weight = 'none' acts on"]),
        (f"learner={{{KL}, kl_in: reward, kl_estimator: k3}}", ["kl_estimator = 'k3' acts on"]),
        (
            f"learner={{{KL}, kl_top_k: 8, kl_tail: false, kl_weight: truncate}}",
            ["kl_weight = 'truncate' acts on nothing with learner.kl_tail = False"],
        ),
        ("learner.reduction=constant_length", ["learner.constant_length_tokens"]),
        ("learner.rejection=mean_k3", ["'mean_k3' needs learner.rejection_bound above 0"]),
        ("learner.rejection_bound=0.1", ["learner.rejection_bound = 0.1 acts on nothing"]),
        ("learner.rejection=veto", ["learner.rejection", "veto", "'max_k3'"]),
        ("learner.guard=action", ["learner.guard = 'action' needs learner.guard_coef"]),
        ("learner.guard_coef=0.1", ["learner.guard_coef = 0.1 acts on nothing"]),
        ("learner.baseline=none", ["learner.advantage_std = 'group'", "set it to 'whiten'"]),
        ("learner.turn_discount=0.9", ["learner.turn_discount = 0.9 acts on nothing"]),
        ("learner.second_moment=0", ["learner.second_moment", "0", "> 0.0"]),
        ("learner.ess_base=1.5", ["learner.ess_base", "1.5", "<= 1.0"]),
        ("learner.offload=disk", ["learner.offload = 'disk'", "'none', 'cpu'"]),
        ("learner.behaviour_floor=3", ["learner.behaviour_floor", "3", "behaviour_cap", "2"]),
        ("learner={objective: reinforce, clip_low: 0.1}", ["clip_low", "0.1", "'reinforce'"]),
        ("learner.betas=[0.9]", ["learner.betas", "0.9"]),
        (
            "learner={optimiser: sgd, betas: [0.9, 0.98]}",
            ["learner.betas = (0.9, 0.98) acts on nothing", "'sgd': set it to [0.9, 0.95]"],
        ),
        ("nonsense", ["nonsense", "a.b=value"]),
        ("seed.deep=1", ["seed", "deep", "1"]),
        ("weight_sync.publish_every=9", ["publish_every", "9", "max_staleness"]),
        ("replay.dead_after_s=300", ["restart_deadline_s", "120", "dead_after_s", "300", "raise"]),
        ("replay.endpoint=tcp://*:5555", ["replay.endpoint", "tcp://*:5555", "actors reach"]),
        ("weight_sync.endpoint=tcp://0.0.0.0:5", ["weight_sync.endpoint", "0.0.0.0", "reach"]),
        ("actors.rollouts_in_flight=2", ["rollouts_in_flight", "2", "group_size"]),
        ("questions.prompt=hello", ["questions.prompt", "hello", "{question}"]),
    ],
)
def test_bad_values_are_named(yaml_file: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load(yaml_file, [override])
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("learner.steps=3", "did you mean 'learner.total_steps'?"),
        ("lr=3", "did you mean 'learner.lr'?"),
        ("lerner.lr=3", "did you mean 'learner'?"),
        ("actors.group_size=3", "did you mean 'replay.group_size'?"),
        ("learner.checkpoint_evry=3", "did you mean 'learner.checkpoint_every'"),
        ("learner.timeout_s=3", "'retrieval.timeout_s' or 'rewards.judge.timeout_s'?"),
        ("learner.qqq=3", "known: objective, clip_low, "),
    ],
)
def test_an_unknown_key_is_told_the_nearest(yaml_file: Path, override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(yaml_file, [override])
    said = str(raised.value)
    assert hint in said and len(said.partition("): ")[2]) <= 80, said


def test_off_is_a_word_of_a_sentinel_though_yaml_reads_it_as_false(
    yaml_file: Path, tmp_path: Path
) -> None:
    config = load(yaml_file, ["sentinels.ess=off", "sentinels.entropy=stop"])
    assert (config.sentinels.ess, config.sentinels.entropy) == ("off", "stop")
    save(config, tmp_path / "saved.yaml")
    assert load(tmp_path / "saved.yaml") == config
    assert parse("sentinels: {ess: off}", [], "").sentinels.ess == "off"


@pytest.mark.parametrize("action", ["restart", "on"])
def test_a_sentinel_cannot_do_what_is_no_action(yaml_file: Path, action: str) -> None:
    said = r"sentinels\.ess = .* choose one of 'off', 'warn', 'stop', 'rollback'"
    with pytest.raises(ConfigError, match=said):
        load(yaml_file, [f"sentinels.ess={action}"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sentinels.rollback_rate=0", r"sentinels\.rollback_rate = 0"),
        ("sentinels.rollback_rate=1.5", r"sentinels\.rollback_rate = 1\.5"),
        ("sentinels.rollbacks=0", r"sentinels\.rollbacks = 0"),
    ],
)
def test_a_rollback_lowers_the_rate_and_may_be_made_once_at_least(
    yaml_file: Path, override: str, said: str
) -> None:
    assert load(yaml_file, ["sentinels.rollback_rate=1"]).sentinels.rollback_rate == 1
    with pytest.raises(ConfigError, match=said):
        load(yaml_file, [override])


def test_missing_file_invalid_yaml_and_duplicate_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(bad)
    bad.write_text("seed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match="twice"):
        load(bad)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 1000, "line 1: nested more than 50 deep"),
        ("[" * 100_000, "line 1: nested more than 50 deep"),
        (
            "\n".join(" " * n + "- a:" for n in range(0, 400, 2)),
            "line 26: nested more than 50 deep",
        ),
        ("a: b: c\n" + "[" * 100_000, "line 1"),
        (f"seed:\n- &a0 [x]\n{LAUGHS}", "line 7: with its aliases more than 100,000 values"),
        ("actors: {engine: &a {x: *a}}", "line 1: 'a' contains itself"),
        ("seed: [*a]", "not valid YAML .line 1.: found undefined alias"),
        ("seed: 1\n" * 200_000, "more than 1,000,000 characters"),
        ("2020-99-99: 1", "a value cannot be read .month must be in 1..12.: quote it"),
        ("seed: !!timestamp x", "a value cannot be read"),
        ("seed: !!bool x", "a value cannot be read"),
        ("seed: !!int ''", "a value cannot be read"),
        (f"seed: {'9' * 5000}", "a value cannot be read"),
    ],
)
def test_what_no_configuration_has_is_named(tmp_path: Path, text: str, said: str) -> None:
    (bad := tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"bad.yaml: .*{said}"):
        load(bad)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.lr=2020-99-99", "a value cannot be read"),
        (f"learner.lr={'[' * 1000}", "nested more than 50 deep"),
        ("learner.lora={rank: 1, rank: 2}", "key 'rank' is given twice"),
    ],
)
def test_an_unreadable_override_is_named(yaml_file: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"override '{re.escape(override)}': .*{said}"):
        load(yaml_file, [override])


def test_saved_configuration_loads_equal(yaml_file: Path, tmp_path: Path) -> None:
    config = load(yaml_file, ["seed=3", "run_dir=/tmp/x"])
    save(config, tmp_path / "saved.yaml")
    assert load(tmp_path / "saved.yaml") == config


def test_a_port_that_is_still_open_has_no_url(yaml_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"retrieval\.port"):
        retrieval_urls(load(yaml_file))


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("questions.prompt={question}", "{question}"),
        ("questions.prompt=Answer: {question} # now", "Answer: {question} # now"),
        ("questions.prompt=[{question}", "[{question}"),
        ('questions.prompt="a\\n {question} "', "a\n {question} "),
        ("run_dir=2024", "2024"),
        ("run_dir=on", "on"),
        ("environment.tools=my:tool", ("my:tool",)),
        ("environment.tools=['my:tool', 'my:other']", ("my:tool", "my:other")),
        ("environment.tools=", ()),
    ],
)
def test_a_field_of_text_takes_it_as_it_stands(override: str, value: object) -> None:
    found: object = parse("", [override], "test")
    for name in override.partition("=")[0].split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("environment: {tools: my:tool}", "got `str`; write a list, environment.tools=['my:tool']"),
        ("learner: {betas: 0.9}", "got `float`; write a list, learner.betas=[0.9]"),
        ("run_dir: null", "expected `str`, got `null`"),
    ],
)
def test_what_is_no_list_is_shown_as_one(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text, [], "test")
    assert str(raised.value).endswith(said)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("localhost:8000", "did you mean http://localhost:8000?"),
        ("ftp://host:1/retrieve", "did you mean http://host:1/retrieve?"),
        ("http://", "give one such as http://127.0.0.1:8000"),
        ("http://host:port", "give one such as http://127.0.0.1:8000"),
        ("http://a:1,http://b:1", "write a list, retrieval.url=[http://a:1,http://b:1]"),
    ],
)
def test_a_retrieval_url_says_how_it_is_reached(yaml_file: Path, url: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(yaml_file, [f"retrieval.url={url}"])
    said = f"retrieval.url = {url!r} is no http:// or https:// address: {remedy}"
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("text", "overrides", "urls"),
    [
        ("retrieval: {url: 'http://a:8000'}", [], ("http://a:8000",)),
        ("retrieval: {url: ['http://a:8000', 'http://b']}", [], ("http://a:8000", "http://b")),
        ("", ["retrieval.url=http://a:8000"], ("http://a:8000",)),
        ("", ["retrieval.url=[http://a:8000,http://b:8000]"], ("http://a:8000", "http://b:8000")),
        ("retrieval: {url: 'http://a'}", ["retrieval.port=8000", "retrieval.url="], None),
        ("retrieval: {url: ''}", ["retrieval.port=8000"], None),
    ],
)
def test_retrieval_servers_are_one_or_a_list(
    text: str, overrides: list[str], urls: tuple[str, ...] | None
) -> None:
    config = parse(text, overrides, "test")
    assert config.retrieval.url == (urls or ())
    assert retrieval_urls(config) == (urls or ("http://127.0.0.1:8000",))
    assert parse(dump(config), [], "saved") == config


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ("[http://a,localhost:1]", "retrieval.url = 'localhost:1' is no .*did you mean"),
        ("[http://a,http://a/retrieve]", "retrieval.url = \\['http://a', .*twice: keep one"),
        ("[3]", "retrieval.url"),
        ("['']", "retrieval.url = '' is no"),
    ],
)
def test_each_retrieval_server_of_a_list_is_checked(urls: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse("", [f"retrieval.url={urls}"], "test")


def test_searches_are_answered_by_one(yaml_file: Path) -> None:
    both = ["retrieval.url=http://x", "retrieval.recorded=runs/a"]
    assert [load(yaml_file, [each]).retrieval.has_own_server for each in both] == [False, False]
    assert load(yaml_file, ["retrieval.url=", "retrieval.recorded="]).retrieval.has_own_server
    with pytest.raises(ConfigError, match=r"retrieval.recorded = 'runs/a' and retrieval.url = 'ht"):
        load(yaml_file, both)


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_shipped_configurations_load(path: Path) -> None:
    load(path)


@pytest.mark.parametrize(
    "given", ["here", "tcp://host", "http://host:1", "tcp://0.0.0.0:1", "tcp://h:99999", "ipc:///x"]
)
def test_a_rendezvous_that_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"learner.rendezvous = .*: give tcp://HOST:PORT"):
        parse("", [f"learner.rendezvous={given}"], "test")


def test_a_copy_on_each_host_is_for_stage_3_alone() -> None:
    with pytest.raises(ConfigError, match=r"hierarchical = True with learner.zero_stage = "):
        parse("", ["learner.hierarchical=true"], "test")
    given = parse("", ["learner.hierarchical=true", "learner.zero_stage=3"], "test")
    assert given.learner.hierarchical


def test_the_schema_marks_what_a_resumed_run_need_not_keep() -> None:
    live = ("price_usd", "budget_usd", "requests_per_s", "concurrency", "timeout_s")
    assert (
        *(f"retrieval.live.{field}" for field in live),
        "replay.keep",
        "learner.total_steps",
        "learner.eval_every",
        "learner.best",
        "learner.checkpoint_every",
        *(f"learner.tracker{s}" for s in ("s", "_project", "_deadline_s")),
        "learner.ranks",
        "learner.zero_stage",
        "learner.offload",
        *(f"sentinels.{name}" for name in SentinelsConfig.__struct_fields__),
        "view.keep_steps",
    ) == CHANGEABLE_FIELDS
    of_the_machine = {"run_dir", "actors.count", "retrieval.port", "retrieval.token_file"}
    of_the_machine |= {"rewards.judge.url", "rewards.judge.key_file", "actors.kv_cache_bytes"}
    of_the_machine |= {"actors.tensor_parallel", "learner.rendezvous"}
    of_the_machine |= {"retrieval.url", "retrieval.host", "retrieval.index_version"}
    of_the_machine |= {f"retrieval.live.{name}" for name in ("url", "key_file", "key_variable")}
    of_the_machine |= {"retrieval.live.record", "environment.mcp_keys"}
    of_the_machine |= {"replay.endpoint", "weight_sync.endpoint", "cluster.address"}
    of_the_machine |= {"cluster.learner", "cluster.actors", "cluster.retrieval_replicas"}
    of_the_machine |= {"cluster.shared", "learner.hierarchical", "keys"}
    of_the_machine |= {field for field in FIELDS if field.startswith("fleet.")}
    assert {*CHANGEABLE_FIELDS} | of_the_machine == MAY_DIFFER


def test_the_schema_marks_what_a_run_reads() -> None:
    assert {*marked(INPUT_PATH)} == {
        "keys",
        "model.path",
        "questions.train",
        "questions.eval",
        "retrieval.corpus",
        "retrieval.index",
        "retrieval.encoder",
        "retrieval.word_index",
        "retrieval.reranker",
        "retrieval.recorded",
        "retrieval.token_file",
        "retrieval.live.key_file",
        "retrieval.live.record",
        "retrieval.live.replay",
        "rewards.judge.key_file",
        "rewards.similarity.model",
        "cluster.shared",
    }


def test_deadlines_are_a_floor_and_the_time_of_the_bytes() -> None:
    learner, sync = LearnerConfig(step_deadline_s=300.0), WeightSyncConfig(publish_deadline_s=30.0)
    assert learner.saving_s(0) == 300.0 and learner.saving_s(1_000_000_000) == 400.0
    anchored = msgspec.structs.replace(learner, anchor="frozen")
    assert anchored.saved_bytes(15_231_233_024) == 198_006_029_312  # 7.6e9 parameters
    alone = msgspec.structs.replace(learner, proximal="behaviour")
    assert alone.saved_bytes(1) == 7
    assert sync.deadline_s(0) == 30.0 and sync.deadline_s(64_000_000_000) == 350.0
    assert sync.deadline_s(2_000_000_000, first=True) == sync.join_deadline_s + 10.0


def test_offload_needs_what_zero_keeps() -> None:
    with pytest.raises(ValueError, match=r"learner.zero_stage = 0 is without: set learner.zero_st"):
        LearnerConfig(offload="cpu", zero_stage=0)


def test_the_keys_of_the_engines_own_arguments_are_open_and_kept(yaml_file: Path) -> None:
    config = load(yaml_file, ["actors.engine.kv_cache_dtype=fp8", "actors.engine.a={b: 1}"])
    assert config.actors.engine == {"kv_cache_dtype": "fp8", "a": {"b": 1}}
    assert parse(dump(config), [], "written").actors.engine == config.actors.engine
    assert parse("actors:\n  engine:\n", [], "empty").actors.engine == {}
    with pytest.raises(ConfigError, match=r"actors\.engine = 4: .*; write a line `key: value` for"):
        load(yaml_file, ["actors.engine=4"])
    with pytest.raises(ConfigError, match=r"did you mean 'actors\.engine\.kv_cache_dtype'\?"):
        load(yaml_file, ["actors.kv_cache_dtype=fp8"])


def test_another_engine_is_another_run(yaml_file: Path) -> None:
    plain = load(yaml_file)
    other = load(yaml_file, ["actors.engine.kv_cache_dtype=fp8"])
    assert differences(plain, other) == {"actors.engine": ({}, {"kv_cache_dtype": "fp8"})}
    assert differences(other, plain) == {"actors.engine": ({"kv_cache_dtype": "fp8"}, {})}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["objective=cispo"], "acts on nothing with learner.objective = 'cispo'"),
        (["proximal=start_of_update"], "learner.proximal = 'start_of_update', where every ratio"),
        (["clip_high=0.3"], "takes the place of learner.clip_low and clip_high"),
    ],
)
def test_a_second_moment_that_bounds_nothing_is_refused(overrides: list[str], said: str) -> None:
    given = [f"learner.{each}" for each in ("second_moment=0.04", *overrides)]
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse("", given, "test")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["baseline=optimal"], "with learner.baseline = 'optimal', which is of whole rollouts"),
        (["kl_in=reward", "kl_coef=0.1", "anchor=ema"], "with learner.kl_in = 'reward', which"),
    ],
)
def test_credit_of_whole_rollouts_leaves_no_room_for_turns(overrides: list[str], said: str) -> None:
    given = [f"learner.{each}" for each in ("turn_credit=1", *overrides)]
    with pytest.raises(ConfigError, match=f"turn_credit = 1.0 {said}"):
        parse("", given, "test")


def test_the_kl_s_switches_are_told_apart_from_what_is_left_out(yaml_file: Path) -> None:
    top_k = ["learner.anchor=ema", "learner.kl_coef=0.1", "learner.kl_top_k=8"]
    config = load(yaml_file, [*top_k, "learner.kl_tail=true", "learner.kl_direction=forward"])
    assert (config.learner.kl_tail, config.learner.kl_weight) == (True, None)
    for name in ("k1", "k2"):
        watched = load(yaml_file, ["learner.anchor=ema", f"learner.kl_estimator={name}"])
        assert watched.learner.kl_estimator == name
    load(yaml_file, ["learner.anchor=ema", "learner.kl_coef=0.1", "learner.kl_in=reward"])
