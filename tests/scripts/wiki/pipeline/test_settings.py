"""Which settings the start and the run are given, and what names them."""

from pathlib import Path

import pytest

from configs.load import load
from scripts.wiki.pipeline import settings
from scripts.wiki.pipeline.settings import CONFIG, WikiOptions, digest, of_run, of_start
from scripts.wiki.wiki import WikiFiles

FILES = WikiFiles(*(Path("/wiki") / name for name in WikiFiles.__dataclass_fields__))
OWN = ("learner.lr=1e-5", "learner.threads=1", "actors.max_turns=2", "replay.group_size=4")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that multiplies bfloat16."""
    monkeypatch.setattr(settings, "lacks_bf16", lambda: False)


def test_the_run_takes_what_the_command_says_last() -> None:
    options = WikiOptions(seed=3, quick=True, overrides=OWN)
    config = load(CONFIG, of_run(options, FILES))
    assert (config.seed, config.learner.total_steps, config.questions.eval_limit) == (3, 6, 64)
    assert (config.learner.lr, config.replay.group_size) == (1e-5, 4)
    assert config.retrieval.index == "/wiki/index" and config.questions.eval == "/wiki/eval"
    assert load(CONFIG, of_run(WikiOptions(quick=True, steps=5))).learner.total_steps == 5


def test_the_start_learns_at_its_own_rate_in_the_run_s_environment() -> None:
    config = load(CONFIG, of_start(WikiOptions(quick=True, overrides=OWN), FILES))
    assert (config.learner.lr, config.learner.threads, config.actors.max_turns) == (2e-4, 1, 2)
    assert config.replay.group_size == 8
    assert config.learner.keep_checkpoints == 1  # gigabytes each


@pytest.mark.parametrize("options", [{"steps": 80}, {"overrides": ("learner.checkpoint_every=1",)}])
def test_what_may_change_while_a_run_goes_on_is_no_part_of_its_name(
    options: dict[str, int],
) -> None:
    other = WikiOptions(**options)  # type: ignore[arg-type]
    assert digest(of_run(WikiOptions(), FILES)) == digest(of_run(other, FILES))


@pytest.mark.parametrize("options", [{"seed": 1}, {"quick": True}, {"overrides": OWN[:1]}])
def test_any_other_setting_is_another_run(options: dict[str, int]) -> None:
    other = WikiOptions(**options)  # type: ignore[arg-type]
    assert digest(of_run(WikiOptions(), FILES)) != digest(of_run(other, FILES))


def test_one_start_serves_runs_that_train_otherwise() -> None:
    of_training = WikiOptions(quick=True, steps=3, overrides=(OWN[0], OWN[3]))
    assert digest(of_start(of_training, FILES)) == digest(of_start(WikiOptions(), FILES))
    of_both = WikiOptions(overrides=(OWN[2],))
    assert digest(of_start(of_both, FILES)) != digest(of_start(WikiOptions(), FILES))


def test_a_cpu_without_bfloat16_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "lacks_bf16", lambda: True)
    config = load(CONFIG, of_run(WikiOptions()))
    assert config.model.dtype == "float32" and settings.is_slow(config)
    wanted = load(CONFIG, of_run(WikiOptions(overrides=("model.dtype=bfloat16",))))
    assert wanted.model.dtype == "bfloat16" and not settings.is_slow(wanted)


LACKING = settings.lacks_bf16  # as it is, before `fast`


@pytest.mark.parametrize(
    ("line", "lacks"),
    [
        ("flags\t\t: fpu avx2 avx512f", True),
        ("flags\t\t: fpu avx512_bf16 avx512f", False),
        ("flags\t\t: fpu amx_bf16 amx_tile", False),
        ("Features\t: fp asimd bf16", False),
        ("Features\t: fp asimd", True),
        ("model name\t: unknown", False),  # it does not say
    ],
)
def test_flags_tell_what_a_cpu_multiplies(line: str, lacks: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert LACKING(tmp_path / "cpuinfo") is lacks
