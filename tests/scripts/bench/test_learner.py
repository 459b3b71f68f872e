"""The learner's benchmark: what it feeds, and that both sides of its ratio do the same work."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.runtime.files import MOST_IDS
from configs.runtime.process import Exit
from configs.schema import Config, LearnerConfig, ModelConfig
from learner.batch import TrainingBatch, build
from learner.errors import BadModel
from learner.model.scorer import TokenScorer, load_model
from scripts import cli
from scripts.bench import head, learner
from scripts.bench.harness import RunFailed
from scripts.bench.head import peak_of
from scripts.bench.learner import (
    DEMO,
    SIBLINGS,
    WIKI,
    BenchLearnerOptions,
    Watch,
    bare_pass,
    last_over_first,
    measure_model,
    measure_update,
    medians,
    random_batch,
    rollout,
)
from scripts.demo.start import Recipe, make_model
from scripts.demo.tokenizer import VOCABULARY, save_tokenizer
from scripts.wiki.pipeline import settings


@pytest.fixture
def demo_model(tmp_path: Path) -> ModelConfig:
    torch.manual_seed(0)
    make_model(Recipe()).save_pretrained(tmp_path / "model")
    return ModelConfig(path=str(tmp_path / "model"), dtype="float32")


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    """The demo's model and tokenizer, for as many tokens as a rollout of the wiki task may have."""
    folder, recipe = tmp_path / "model", Recipe(max_tokens=2048)
    make_model(recipe).save_pretrained(folder)
    save_tokenizer(folder, recipe.max_tokens)
    return folder


def test_rollouts_are_as_long_as_the_demos() -> None:
    rng = np.random.default_rng(1)
    lengths = [len(rollout(rng, DEMO, group, 0).sequences[0].tokens) for group in range(300)]
    assert 40 <= min(lengths) < 60 and 110 < max(lengths) <= 140


def test_rollouts_are_as_long_as_the_wiki_task_s() -> None:
    gauges = build(random_batch(WIKI), LearnerConfig(), vocabulary=MOST_IDS).gauges
    assert 450 < gauges["learner/tokens"] / gauges["learner/sequences"] < 510


def test_both_sides_score_the_same_tokens_alike(demo_model: ModelConfig) -> None:
    model, training = (
        load_model(demo_model),
        build(random_batch(DEMO), LearnerConfig(), vocabulary=MOST_IDS),
    )
    assert training.gauges["learner/sequences"] == DEMO.groups * SIBLINGS
    micro = training.micro_batches[-1]
    with torch.no_grad():
        ours = TokenScorer(model)(micro.tokens, micro.loss_mask, 1.0)[0]
        torch.testing.assert_close(bare_pass(model, micro), ours, rtol=1e-5, atol=1e-5)


def test_a_stopwatch_counts_what_it_is_told_to() -> None:
    seconds = {"sorting": 0.0}
    watched = Watch([3, 1], {"sort": "sorting"}, seconds)
    watched.sort()
    assert watched.pop() == 3 and seconds["sorting"] > 0.0 and len(seconds) == 1


@pytest.mark.slow
def test_the_peak_is_what_the_work_needed_at_its_worst() -> None:
    def work() -> int:
        large = torch.ones(64 << 20, dtype=torch.uint8)
        total = int(large[:5].sum())
        del large
        return total

    for _ in range(2):  # also when malloc has such memory at hand
        result, peak = peak_of(work)
        assert result == 5 and 60 << 20 < peak < 90 << 20
    assert peak_of(lambda: None)[1] < 4 << 20


@pytest.mark.slow
@pytest.mark.soak("benchmarks")
@pytest.mark.timeout(900)
def test_the_head_needs_a_fraction_of_the_plain_one_s_memory() -> None:
    figures = head.compare(1, 0.0, 1, print)
    assert figures["logprob_peak_memory_ratio"] <= 0.15
    assert figures["logprob_difference"] <= 1e-5


@pytest.mark.slow
def test_a_measurement_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"bench_head-none ended with 1: .*Invalid enum value"):
        head.measure("none", tmp_path / "none", 1)  # type: ignore[arg-type]


def test_a_pace_is_compared_at_its_ends() -> None:
    assert last_over_first([10.0, 8.0, 1.0, 5.0, 4.0]) == 0.5
    assert last_over_first([10.0, 8.0, 5.0, 4.0]) is None


@pytest.mark.parametrize("lacks", [False, True])
def test_a_model_is_measured_as_the_wiki_task_trains_it(
    lacks: bool, long_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked = list[tuple[Config, list[TrainingBatch]]]()

    def measured(config: Config, batches: list[TrainingBatch], _: Any) -> Any:
        asked.append((config, batches))
        return {"whole update": [2.0, 3.0], "bare passes": [2.0, 2.0]}, {}

    for module in (learner, settings):
        monkeypatch.setattr(module, "lacks_bf16", lambda: lacks)
    monkeypatch.setattr(learner, "measure_update", measured)
    options = BenchLearnerOptions(quick=True, model=long_model)
    found = measure_model(options, long_model, print)
    ((config, batches),) = asked
    assert config.model.dtype == ("float32" if lacks else "bfloat16")
    assert ("no instructions for bfloat16" in capsys.readouterr().out) == lacks
    assert len(batches) == 3 and options.at_once == config.learner.threads == 2
    most = max(int(micro.tokens.max()) for batch in batches for micro in batch.micro_batches)
    assert 0.9 * len(VOCABULARY) < most < len(VOCABULARY)
    assert found["update_over_bare"] == 1.25 and found["last_over_first"] is None


@pytest.mark.slow
def test_a_small_model_s_updates_are_told(long_model: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "figures.json"
    given = ["--model", str(long_model), "--quick", "--json", str(file), "--threads", "1"]
    assert cli.main(["bench", "learner", *given]) == Exit.DONE
    found = json.loads(file.read_text())
    assert found["update_over_bare"] > 0 and len(found["tokens_per_s_by_update"]) == 2
    assert "update_over_bare" in capsys.readouterr().out


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=re.escape(str(tmp_path))):
        measure_model(BenchLearnerOptions(model=tmp_path), tmp_path, print)


@pytest.mark.slow
def test_the_parts_make_up_the_update(demo_model: ModelConfig) -> None:
    config = Config(model=demo_model, learner=LearnerConfig(lr=1e-4, micro_batch_tokens=2048))
    batches = [
        build(random_batch(DEMO, seed), config.learner, vocabulary=MOST_IDS) for seed in (0, 1)
    ]
    assert batches[0].gauges["learner/tokens"] != batches[1].gauges["learner/tokens"]
    found, peaks = measure_update(config, batches, print)
    assert {len(values) for values in found.values()} == {1}
    over_bare, rates = medians(found).values()
    assert over_bare == rates["whole update"] / rates.pop("bare passes") > 0.0
    assert peaks.keys() < found.keys() and peaks["whole update"] >= peaks["forward + backward"] > 0
    whole = 1.0 / rates.pop("whole update")
    assert sum(1.0 / rate for rate in rates.values()) == pytest.approx(whole)
