"""Checkpoints are whole or absent, the best is kept, another run's refused; starts are numbered."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from configs.schema import Config
from learner import checkpoint
from learner.checkpoint import next_incarnation
from learner.errors import BadCheckpoint


class Exporter:
    """A trainer whose model is its configuration."""

    def export(self, folder: Path) -> None:
        for part in ("model", "ema", "state"):
            (folder / part).mkdir(parents=True)
        for part in ("model", "ema"):
            (folder / part / "config.json").write_text("{}")
        (folder / "state" / "rank-0.safetensors").touch()


@pytest.fixture
def save(config: Config, word_tokenizer: Any) -> Callable[..., Path]:
    """save(step) → the folder."""
    return lambda step: checkpoint.save(config, step, Exporter(), word_tokenizer, incarnation=4)


def names(config: Config) -> list[str]:
    return sorted(path.name for path in (Path(config.run_dir) / "checkpoints").iterdir())


def test_the_newest_are_kept(config: Config, save: Callable[..., Path]) -> None:
    assert checkpoint.newest(config.run_dir) is None
    for step in (9, 10, 11):
        save(step)
        checkpoint.retain(config.run_dir, 2, lambda _: None)
    assert names(config) == ["step-10", "step-11"]
    found = checkpoint.newest(config.run_dir)
    assert found.folder == Path(config.run_dir) / "checkpoints" / "step-11"


def test_the_best_is_kept_too(config: Config, save: Callable[..., Path]) -> None:
    for step in range(1, 6):
        save(step)
        checkpoint.retain(config.run_dir, 2, lambda steps: 2 if 2 in steps else None)
    assert names(config) == ["best", "step-2", "step-4", "step-5"]
    best = Path(config.run_dir) / "checkpoints" / "best"
    assert best.is_symlink() and best.resolve().name == "step-2"
    checkpoint.retain(config.run_dir, 2, lambda _: 5)
    assert names(config) == ["best", "step-4", "step-5"] and best.resolve().name == "step-5"


def test_what_is_still_needed_is_kept(config: Config, save: Callable[..., Path]) -> None:
    for step in (20, 25, 30):
        save(step)
        checkpoint.retain(config.run_dir, 1, lambda _: None, needed=[20, 40])
    assert names(config) == ["step-20", "step-30"]
    checkpoint.retain(config.run_dir, 1, lambda steps: 20 if 20 in steps else None)
    assert names(config) == ["best", "step-20", "step-30"]


def test_the_best_stays_when_its_score_is_lost(config: Config, save: Callable[..., Path]) -> None:
    save(1)
    checkpoint.retain(config.run_dir, 1, lambda _: 1)
    for step in (2, 3):
        save(step)
        checkpoint.retain(config.run_dir, 1, lambda _: None)
    assert names(config) == ["best", "step-1", "step-3"]
    best = Path(config.run_dir) / "checkpoints" / "best"
    assert best.resolve().name == "step-1" and best.exists()


@pytest.fixture
def disk(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Syncs and renames, in order, by path below the run's directory."""
    events: list[tuple[str, ...]] = []
    rename, root = Path.rename, Path(config.run_dir).resolve()

    def name(path: str | Path) -> str:
        return str(Path(path).resolve().relative_to(root))

    def recorded(path: Path, target: Path) -> Path:
        events.append(("rename", name(path), name(target)))
        return rename(path, target)

    monkeypatch.setattr(
        os, "fsync", lambda fd: events.append(("sync", name(f"/proc/self/fd/{fd}")))
    )
    monkeypatch.setattr(Path, "rename", recorded)
    return events


def test_all_of_it_is_on_the_disk_before_it_has_its_name(
    save: Callable[..., Path], disk: list[tuple[str, ...]]
) -> None:
    folder, draft = save(1), "checkpoints/step-1.draft"
    named = disk.index(("rename", draft, "checkpoints/step-1"))
    inside = {("sync", f"{draft}/{path.relative_to(folder)}") for path in folder.rglob("*")}
    assert len(inside) > 6 and inside | {("sync", draft)} == set(disk[:named])
    # Then the name itself, and that of the directory that it is in.
    assert disk[named + 1 :] == [("sync", "checkpoints"), ("sync", ".")]


def test_each_model_has_its_tokenizer(save: Callable[..., Path], word_tokenizer: Any) -> None:
    folder = save(1)
    for part in ("model", "ema"):
        loaded = AutoTokenizer.from_pretrained(folder / part)
        assert loaded.get_vocab() == word_tokenizer.get_vocab()
    assert [path.name for path in (folder / "state").iterdir()] == ["rank-0.safetensors"]


def test_it_says_what_it_is_of(config: Config, save: Callable[..., Path]) -> None:
    said = json.loads((save(3) / "checkpoint.json").read_text())
    facts = {"step": 3, "incarnation": 4, "replay_position": 3, "seed": 0, "ranks": 1}
    assert facts.items() <= said.items()
    assert said["architecture"]["hidden_size"] == 96 and len(said["architecture_digest"]) == 16
    assert said["config"]["learner"]["lr"] == config.learner.lr
    checkpoint.check(checkpoint.newest(config.run_dir), config)


def test_a_checkpoint_that_was_cut_short_is_not_one(
    config: Config, save: Callable[..., Path], word_tokenizer: Any
) -> None:
    class Broken:
        def export(self, folder: Path) -> None:
            (folder / "model").mkdir()
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        checkpoint.save(config, 1, Broken(), word_tokenizer)
    assert checkpoint.newest(config.run_dir) is None
    save(1)
    assert names(config) == ["step-1"], "what was left half-written is removed"


def test_saving_a_step_again_replaces_it(config: Config, save: Callable[..., Path]) -> None:
    (save(1) / "stale").touch()
    assert not (save(1) / "stale").exists()
    assert names(config) == ["step-1"]


def test_another_architecture_is_refused_by_name(
    config: Config, save: Callable[..., Path], tmp_path: Path
) -> None:
    save(1)
    other = tmp_path / "other"
    shutil.copytree(config.model.path, other)
    written = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(written | {"hidden_size": 192}))
    changed = msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, path=str(other))
    )
    words = "step-1' is of another architecture: hidden_size of model.path = 96 there, 192 here"
    with pytest.raises(BadCheckpoint, match=words):
        checkpoint.check(checkpoint.newest(config.run_dir), changed)


def test_another_setting_is_refused_by_name(config: Config, save: Callable[..., Path]) -> None:
    save(1)
    learner = msgspec.structs.replace(config.learner, lr=0.5, proximal_decay=0.9)
    changed = msgspec.structs.replace(config, learner=learner, seed=5)
    with pytest.raises(BadCheckpoint, match=r"seed = 0 there, 5 here; ") as raised:
        checkpoint.check(checkpoint.newest(config.run_dir), changed)
    for words in ("lr = ", "there, 0.5 here", "proximal_decay = "):
        assert words in str(raised.value)


def test_length_cadence_ranks_and_place_may_be_others(
    config: Config, save: Callable[..., Path]
) -> None:
    save(1)
    learner = msgspec.structs.replace(
        config.learner,
        total_steps=900,
        eval_every=7,
        checkpoint_every=3,
        ranks=2,
        zero_stage=3,
        offload="cpu",
        rendezvous="tcp://10.0.0.1:4000",
    )
    changed = msgspec.structs.replace(
        config,
        run_dir="elsewhere",
        learner=learner,
        retrieval=msgspec.structs.replace(config.retrieval, port=4321),
    )
    checkpoint.check(checkpoint.newest(config.run_dir), changed)


def test_a_state_is_whole_as_whoever_saved_it_made_it(config: Config, word_tokenizer: Any) -> None:
    learner = msgspec.structs.replace(config.learner, ranks=2)
    two = msgspec.structs.replace(config, learner=learner)
    folder = checkpoint.save(two, 1, Exporter(), word_tokenizer)
    with pytest.raises(BadCheckpoint, match=r"is not whole: \S+rank-1.safetensors is missing"):
        checkpoint.check(checkpoint.newest(config.run_dir), config)
    (folder / "state" / "rank-1.safetensors").touch()
    checkpoint.check(checkpoint.newest(config.run_dir), config)


def test_a_setting_that_is_not_known_any_more_is_refused(
    config: Config, save: Callable[..., Path]
) -> None:
    save(1)
    found = checkpoint.newest(config.run_dir)
    spoilt = msgspec.structs.replace(found.manifest, config={"learner": {"strange": 1}})
    with pytest.raises(BadCheckpoint, match=r"step-1'.*strange.*start a new run with model.path="):
        checkpoint.check(checkpoint.Checkpoint(found.folder, spoilt), config)


def test_a_folder_without_its_description_is_refused(
    config: Config, save: Callable[..., Path]
) -> None:
    (save(1) / "checkpoint.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"step-1'.*start a new run with model.path="):
        checkpoint.newest(config.run_dir)


def test_each_start_counts_one_more(tmp_path: Path) -> None:
    assert [next_incarnation(tmp_path / "run") for _ in range(3)] == [1, 2, 3]


def test_a_checkpoint_may_know_of_more(tmp_path: Path) -> None:
    assert next_incarnation(tmp_path, known=7) == 8
    assert next_incarnation(tmp_path, known=7) == 9


def test_a_spoilt_counter_is_named(tmp_path: Path) -> None:
    (tmp_path / "incarnation").write_text("two")
    with pytest.raises(BadCheckpoint, match=r"incarnation: 'two' is not a number"):
        next_incarnation(tmp_path)


def test_a_checkpoint_gets_the_time_of_its_bytes_and_says_how_many(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []
    monkeypatch.setattr(checkpoint, "phase", lambda *given: nullcontext(asked.append(given)))
    monkeypatch.setattr(checkpoint, "weights_bytes", lambda _path: 15_231_233_024)
    with checkpoint.saving(config, "checkpoint of step 3"):
        pass
    ((name, limit_s),) = asked
    assert name == "checkpoint of step 3 (152.3 GB)"
    assert limit_s == pytest.approx(300 + 1523.1, abs=0.1)
