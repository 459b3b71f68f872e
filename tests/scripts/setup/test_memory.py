"""`forage memory`: what it prints and writes, for machines and models that are not here."""

import json
from pathlib import Path

import pytest

from configs.load import ConfigError, load
from configs.runtime.process import REPOSITORY, Exit
from scripts import cli
from scripts.setup import gpu_memory, machine
from scripts.setup.memory import MemoryOptions, reckon

CONFIGS = REPOSITORY / "configs"
RECIPES = {
    "search_r1_3b_grpo": "Qwen2.5-3B",
    "search_r1_7b_grpo": "Qwen2.5-7B",
    "ema_pg_3b": "Qwen2.5-3B",
    "asearcher_7b": "Qwen2.5-7B",
    "one_gpu": "Qwen2.5-0.5B",
}


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(gpu_memory, "totals", list)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    code = cli.main(["memory", *words])
    return code, [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_reckoned_without_its_gpus_and_its_model(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = (str(CONFIGS / f"{name}.yaml"), f"model.path={RECIPES[name]}", "--gib", "79")
    code, lines = said(capsys, *words, "--json", str(tmp_path / "figures.json"))
    assert code == Exit.DONE and max(map(len, lines)) <= 80
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["fits"] and len(written["gpus"]) == (1 if name == "one_gpu" else 8)
    for tenant in written["gpus"][0].values():
        for what, size in tenant.items():
            assert any(f" {what} " in line and f"{size / 2**30:.2f}" in line for line in lines)
    for what in ("GPU", "host", "rollouts in flight", "a turn, at most", "new weights, every"):
        assert any(line.startswith(what) for line in lines), what


def test_a_part_says_how_it_is_reckoned(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(CONFIGS / "search_r1_7b_grpo.yaml")
    _, lines = said(capsys, recipe, "model.path=Qwen2.5-7B")
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert (
        f"optimiser, with fp32 weights {12 * 7615616512 / 4 / 2**30:.2f} 12 x 7.62e9 / 4 ranks"
        in text
    )
    assert "averages 7.09 4 x 7.62e9 / 4 ranks" in text and "719,431 tokens of 56 KiB" in text
    assert "719,431 tokens / 2,448 a context, 256 slots" in text
    assert "weight_sync.publish_every = 5" in text


def test_what_a_run_starts_with_is_what_doctor_asks_for(
    capsys: pytest.CaptureFixture[str], tiny_model_path: Path
) -> None:
    words = ("defaults=cpu", f"model.path={tiny_model_path}", "actors.kv_cache_bytes=4000000000")
    _, lines = said(capsys, str(CONFIGS / "base.yaml"), *words)
    config = load(CONFIGS / "base.yaml", words)
    least = f"{machine.least_memory(machine.memory_needed(config)) / 2**30:.2f}"
    assert any(line.startswith(f"A run starts where {least} GiB of it are free") for line in lines)


def test_the_manual_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    text = (REPOSITORY / "docs" / "running.md").read_text()
    command, _, shown = text.partition("$ forage memory ")[2].partition("\n")
    _, lines = said(capsys, *command.split())
    assert shown.startswith("\n".join(lines) + "\n```\n")


def test_what_does_not_fit_fails_with_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(CONFIGS / "base.yaml"), "model.path=Qwen2.5-32B", "--gpus", "8")
    code, lines = said(capsys, *words)
    assert code == Exit.FAILED and "Too much for a GPU: lower actors.kv_cache_bytes" in str(lines)
    assert not any(line.startswith("rollouts in flight") for line in lines)


def test_workers_that_cannot_share_a_model_out_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("model.path=Qwen2.5-7B", "--gpus", "8", "actors.tensor_parallel=8")
    code = cli.main(["memory", str(CONFIGS / "base.yaml"), *words])
    said = capsys.readouterr().err
    assert code == Exit.BAD_INPUT
    assert "actors.tensor_parallel = 8: the model's num_attention_heads 28 cannot be shared" in said


def test_what_an_engines_workers_share_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model.path=Qwen2.5-3B", "--gpus", "8", "actors.tensor_parallel=4")
    code, lines = said(capsys, str(CONFIGS / "base.yaml"), *words)
    text = " ".join(" ".join(lines).split())
    assert code == Exit.DONE and "2 x 3.09e9 / 4 workers" in text
    assert "tokens of 72 KiB / 4 workers" in text  # two of them hold the same
    assert "weights received 0.58 what passes through" in text


def test_a_cpu_is_told_its_host_and_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = said(capsys, str(CONFIGS / "base.yaml"), "model.path=Qwen2.5-0.5B")
    text = " ".join(" ".join(lines).split())
    assert code == Exit.DONE and "rollouts in flight 1 x 16" in text
    assert not any(line.startswith(("GPU", "a turn")) for line in lines)


def test_the_gpus_that_are_here_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.setup.memory.totals", lambda: [22 << 30])
    here = reckon(MemoryOptions(str(CONFIGS / "one_gpu.yaml"), ("model.path=Qwen2.5-0.5B",)))
    assert here.total == 22 << 30 and len(here.gpus) == 1 and here.fits


@pytest.mark.parametrize("here", [[], [70 << 30] * 8])
def test_over_nodes_the_gpus_that_are_here_are_some(
    here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.setup.memory.totals", lambda: here)
    path = str(CONFIGS / "search_r1_7b_4x8.yaml")
    found = reckon(MemoryOptions(path, ("model.path=Qwen2.5-7B",)))
    assert len(found.gpus) == 32 and found.total == (70 << 30 if here else 79 << 30)
    with_encoder = [gpu for gpu, each in enumerate(found.gpus) if "retrieval server" in each]
    assert with_encoder == [8]  # beside the first actor; the learner's eight have none


@pytest.mark.parametrize("path", ["", "nowhere", "Qwen2.5-8B"])
def test_a_model_of_unknown_size_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=f"model.path = '{path}': its size cannot be read"):
        reckon(MemoryOptions(str(CONFIGS / "base.yaml"), (f"model.path={path}",)))
