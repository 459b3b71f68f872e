"""The wiki task from its packages to a trained model: in what order, and how it goes on."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError, load, save
from configs.runtime.process import REPOSITORY, Exit
from scripts import cli
from scripts.setup.resolve import resolve
from scripts.wiki import packages
from scripts.wiki.packages import WikiError
from scripts.wiki.pipeline import pipeline, settings
from scripts.wiki.pipeline.settings import WikiOptions
from scripts.wiki.pipeline.start import Candidate, Choice
from scripts.wiki.wiki import WikiFiles
from tests.scripts.wiki.pipeline.tiny import FEW, lengthened

SUMMARY = {
    "status": "completed",
    "steps": 40,
    "eval_questions": 128,
    "wall_s": 3000.0,
    "staleness_max": 2,
    **dict.fromkeys(("token_mismatches", "refits", "retrieval_errors"), 0),
    **{f"{name}_start": 0.25 for name in ("em", "sampled_em", "searches")},
    **{f"{name}_final": 0.75 for name in ("em", "sampled_em", "searches")},
    "em_start_by_hops": {"1": 0.3, "2": 0.2},
    "em_final_by_hops": {"1": 0.8, "2": 0.7},
}


class Phases:
    """What was called, with stand-ins that do nothing; `code`: what training ends with."""

    def __init__(self, cache: Path) -> None:
        self.called, self.code, self.summary = list[str](), 0, SUMMARY
        names = {name: cache / name for name in WikiFiles.__dataclass_fields__}
        self.files, self.run_dir = WikiFiles(**names), Path()

    def build(self, *_: Any, **__: Any) -> WikiFiles:
        self.called.append("build")
        return self.files

    def choose(self, folder: Path, *_: Any) -> tuple[Path, Choice]:
        self.called.append("choose")
        return folder / "warm" / "model", Choice(10, [Candidate(10, 0.25, 300.0)])

    def train(self, options: Any) -> int:
        self.called.append("train")
        config = load(options.config, options.overrides)
        assert config.model.path.endswith("/warm/model")
        folder = Path(config.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save(resolve(config, "wiki"), folder / "config.yaml")
        return self._ran(folder)

    def resume(self, options: Any) -> int:
        self.called.append("resume")
        return self._ran(options.run)

    def _ran(self, folder: Path) -> int:
        self.run_dir = folder
        (folder / "summary.json").write_text(json.dumps(self.summary))
        return self.code


@pytest.fixture
def phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Phases:
    found = Phases(tmp_path)
    for name in ("build", "choose", "train", "resume"):
        monkeypatch.setattr(pipeline, name, getattr(found, name))
    monkeypatch.setattr(pipeline, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(pipeline.preflight, "check_machine", lambda config: None)
    monkeypatch.setattr(pipeline.preflight, "check", lambda config, resumed: None)
    monkeypatch.setattr(settings, "lacks_bf16", lambda: False)
    return found


def test_each_phase_is_named_and_what_came_of_it_is_said(phases: Phases, capsys: Any) -> None:
    assert pipeline.run(WikiOptions(), Path("/cache")) == Exit.DONE
    assert phases.called == ["build", "choose", "train"]
    said = capsys.readouterr().out
    assert all(f"{n} of 3: {name} ..." in said for n, name in enumerate(pipeline.PHASES, 1))
    assert "greedy            0.250 -> 0.750\n" in said
    assert "    2 hops          0.200 -> 0.700\n" in said
    assert "token mismatches 0, refits 0, retrieval errors 0" in said
    assert "start 5.0, training 50.0\n" in said and f"run: {phases.run_dir}\n" in said


@pytest.mark.parametrize("name", ["token_mismatches", "refits", "retrieval_errors"])
def test_a_run_with_faults_fails_with_a_line(name: str, phases: Phases, capsys: Any) -> None:
    phases.summary = SUMMARY | {name: 3}
    for _ in ("trained", "told of"):
        assert pipeline.run(WikiOptions(), Path("/cache")) == Exit.FAILED
        said = capsys.readouterr().out
        assert f"not as it should be: 3 {name.replace('_', ' ')}, where 0 are due" in said
        assert "-> 0.750" in said  # what it reached is said all the same


def test_a_finished_run_is_told_of_and_more_steps_go_on_with_it(
    phases: Phases, capsys: Any
) -> None:
    pipeline.run(WikiOptions(), Path("/cache"))
    assert pipeline.run(WikiOptions(), Path("/cache")) == Exit.DONE
    assert phases.called == ["build", "choose", "train", "build"]  # its start may be gone
    assert capsys.readouterr().out.count("-> 0.750") == 6  # three lines, twice
    pipeline.run(WikiOptions(steps=80), Path("/cache"))
    assert phases.called[-1] == "resume"


def test_an_interrupted_run_goes_on_with_the_same_command(phases: Phases, capsys: Any) -> None:
    phases.code, phases.summary = Exit.INTERRUPTED, SUMMARY | {"status": "interrupted"}
    assert pipeline.run(WikiOptions(), Path("/cache")) == Exit.INTERRUPTED
    assert "the same command goes on where this was interrupted" in capsys.readouterr().out
    pipeline.run(WikiOptions(), Path("/cache"))
    assert phases.called == ["build", "choose", "train", "build", "choose", "resume"]


def test_a_failed_run_is_not_called_interrupted(phases: Phases, capsys: Any) -> None:
    phases.code, phases.summary = Exit.FAILED, SUMMARY | {"status": "failed"}
    assert pipeline.run(WikiOptions(), Path("/cache")) == Exit.FAILED
    said = capsys.readouterr().out
    assert "training failed" in said and "once that is mended, the same command goes on" in said
    assert "interrupted" not in said


def test_checkpoints_that_are_there_are_room_that_is_had(
    phases: Phases, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    phases.code, phases.summary = Exit.INTERRUPTED, SUMMARY | {"status": "interrupted"}
    monkeypatch.setattr(pipeline, "require_room", lambda place, needed: asked.append(needed))
    monkeypatch.setattr(pipeline, "checkpoints_bytes", lambda plan: 300)
    for _ in ("from nothing", "with 100 bytes"):
        pipeline.run(WikiOptions(), Path("/cache"))
        (phases.run_dir / "checkpoints" / "step-5").mkdir(parents=True, exist_ok=True)
        (phases.run_dir / "checkpoints" / "step-5" / "state").write_bytes(bytes(100))
    assert asked == [300, 300, 200, 200]


def test_another_setting_is_another_run(phases: Phases) -> None:
    pipeline.run(WikiOptions(), Path("/cache"))
    first = phases.run_dir
    pipeline.run(WikiOptions(quick=True), Path("/cache"))
    assert phases.called.count("train") == 2 and phases.run_dir != first


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (WikiOptions(seed=1), "the run there has seed = 0, this one has 1: name another folder"),
        (WikiOptions(overrides=("learner.lr=1e-5",)), "has learner.lr = 4e-05, this one has 1e-05"),
        (WikiOptions(overrides=("learner.checkpoint_every=3",)), None),  # may change
    ],
)
def test_a_folder_that_holds_another_run_is_refused(
    given: WikiOptions, said: str | None, phases: Phases, tmp_path: Path
) -> None:
    folder = f"run_dir={tmp_path / 'mine'}"
    pipeline.run(WikiOptions(overrides=(folder,)), Path("/cache"))
    assert phases.run_dir == tmp_path / "mine"
    again = replace(given, overrides=(folder, *given.overrides))
    if said is None:
        pipeline.run(again, Path("/cache"))
    else:
        with pytest.raises(ConfigError, match=said):
            pipeline.run(again, Path("/cache"))
    assert phases.called.count("train") == 1


def test_the_folder_of_another_task_is_refused(phases: Phases, tmp_path: Path) -> None:
    other = load(REPOSITORY / "configs" / "demo.yaml", ["questions.train=x"])
    save(other, tmp_path / "config.yaml")
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    with pytest.raises(
        ConfigError, match=r"the run there has questions\.train = 'x', this one has"
    ):
        pipeline.run(WikiOptions(overrides=(f"run_dir={tmp_path}",)), Path("/cache"))
    assert phases.called == ["build"]


def test_a_run_goes_on_in_a_folder_behind_a_link(phases: Phases, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "disk")
    names = {name: tmp_path / "linked" / name for name in WikiFiles.__dataclass_fields__}
    phases.files = WikiFiles(**names)
    given = WikiOptions(overrides=(f"run_dir={tmp_path / 'run'}", "retrieval.reranker=rr"))
    for _ in range(2):
        assert pipeline.run(given, Path("/cache")) == Exit.DONE
    assert phases.called.count("train") == 1


def test_a_machine_that_will_not_do_is_refused_before_anything_is_fetched(
    phases: Phases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(_: object) -> None:
        raise ConfigError("too little memory")

    monkeypatch.setattr(pipeline.preflight, "check_machine", check)
    with pytest.raises(ConfigError, match="too little memory"):
        pipeline.run(WikiOptions(), Path("/cache"))
    assert not phases.called


def test_a_full_disk_is_named_before_the_start(
    phases: Phases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "weights_bytes", lambda folder: 269_000_000)
    monkeypatch.setattr(packages.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 9))
    with pytest.raises(WikiError, match=r"runs/wiki-0-\w+: 0 MB are free, 5,749 MB are needed"):
        pipeline.run(WikiOptions(), Path("/cache"))
    assert phases.called == ["build"]


def test_a_cpu_without_bfloat16_is_told_what_that_costs(
    phases: Phases, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(settings, "lacks_bf16", lambda: True)
    pipeline.run(WikiOptions(), Path("/cache"))
    assert capsys.readouterr().out.startswith(settings.SLOW)


def test_what_cannot_be_fetched_is_one_line(
    phases: Phases, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def build(*_: object, **__: object) -> None:
        raise WikiError("world-countries 5.1.0 cannot be fetched: no network")

    monkeypatch.setattr(pipeline, "build", build)
    assert cli.main(["demo", "wiki"]) == Exit.FAILED
    assert capsys.readouterr().err.endswith("cannot be fetched: no network\n")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_tiny_model_goes_through_all_phases_once(
    spelling_model_path: Path, tmp_path: Path
) -> None:
    lengthened(spelling_model_path, tmp_path / "model")
    command = [sys.executable, "-m", "tests.scripts.wiki.pipeline.tiny", str(tmp_path)]
    command += ["--steps", "2", *FEW, f"run_dir={tmp_path / 'run'}"]
    for expected in ("2 steps: sampled EM 0.000", "trained already"):
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr
        assert "2 steps, staleness" in done.stdout and "refits 0" in done.stdout
    (start,) = tmp_path.glob("start-0-*")
    assert not (start / "warm" / "checkpoints").exists()


_REAL = """
import sys
from pathlib import Path
from scripts.wiki.pipeline.pipeline import run
from scripts.wiki.pipeline.settings import WikiOptions
sys.exit(run(WikiOptions(steps=2, overrides=tuple(sys.argv[2:])), Path(sys.argv[1])))
"""


@pytest.mark.soak("wiki")
@pytest.mark.timeout(3600)
def test_the_real_model_takes_two_steps(tmp_path: Path) -> None:
    """A download of 104 MB, a start of a real model, two steps of training."""
    words = [str(tmp_path / "wiki"), "questions.eval_limit=16", f"run_dir={tmp_path / 'run'}"]
    subprocess.run([sys.executable, "-c", _REAL, *words], cwd=REPOSITORY, check=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["sampled_em_start"] > 0.1
    assert summary["token_mismatches"] == summary["refits"] == summary["retrieval_errors"] == 0
