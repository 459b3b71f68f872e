"""Two real ranks over gloo at every ZeRO stage, against one plain rank and against themselves."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.runtime.files import MOST_IDS
from configs.schema import Config, LearnerConfig, ModelConfig
from learner.batch import TrainingBatch, build, build_shares
from learner.health.tokens import TokenFiles, file_of
from learner.model.ema import Averages
from learner.model.scorer import TokenScorer
from learner.ranks.shares import encode_share
from learner.update import Note, update
from replay.protocol import Batch
from tests.children import ends_with_us

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1400)]
PROGRAM = Path(__file__).with_name("one_of_two_ranks.py")
DTYPES = ["float32", "bfloat16"]


@dataclass
class Pair:
    """The findings of two ranks that have ended."""

    config: Config
    folder: Path
    shares: tuple[TrainingBatch, ...]  # of step 1
    facts: list[dict[str, Any]]

    def weights(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def learner() -> LearnerConfig:
    return LearnerConfig(
        warmup_steps=2, max_grad_norm=0.5, micro_batch_tokens=60, betas=(0.9, 0.98),
        proximal_decay=0.8, kl_coef=0.05, kl_top_k=3, anchor="ema", anchor_period=2,
        anchor_tau=0.5, ranks=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def batches(batch: Callable[..., Batch]) -> list[Batch]:
    return [batch(step, step - 1, groups=3) for step in (1, 2, 3)]


OTHERS = [pytest.param(stage, marks=pytest.mark.soak("ranks")) for stage in (0, 1, 2)]


@pytest.fixture(scope="module", params=[*OTHERS, 3], ids="zero{}".format)
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_path: Path,
    learner: LearnerConfig,
    batches: list[Batch],
) -> Pair:
    """Both ranks run to their end once per stage."""
    folder = tmp_path_factory.mktemp("pair")
    config = Config(
        model=ModelConfig(path=str(tiny_model_path), dtype="float32"),
        learner=msgspec.structs.replace(learner, zero_stage=request.param),
    )
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    shares = [build_shares(batch, config.learner, vocabulary=MOST_IDS) for batch in batches]
    for step, of_step in enumerate(shares, 1):
        for rank, share in enumerate(of_step):
            (folder / f"share-{step}.{rank}").write_bytes(encode_share(share))
    ranks = []
    for rank in (0, 1):
        with (folder / f"errors-{rank}").open("wb") as errors:
            command = [sys.executable, str(PROGRAM), str(folder), str(rank)]
            env = ends_with_us()
            ranks.append(subprocess.Popen(command, stdout=errors, stderr=errors, env=env))
    try:
        codes = [rank.wait(timeout=1200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], (folder / "errors-0").read_text()[-3000:]
    facts = [msgspec.json.decode((folder / f"facts-{rank}.json").read_bytes()) for rank in (0, 1)]
    return Pair(config, folder, shares[0], facts)


def plain(
    make_plain_engine: Callable[..., Any],
    pair: Pair,
    batches: list[Batch],
    steps: int,
    name: str,
    note: Note | None = None,
) -> tuple[Any, list[dict[str, float]]]:
    """One plain rank's engine after as many steps, and its gauges."""
    lr = {"sgd": 1e-2, "adamw": 1e-3}[name]
    learner = msgspec.structs.replace(pair.config.learner, lr=lr)
    if name == "sgd":
        learner = msgspec.structs.replace(learner, optimiser=name, betas=LearnerConfig().betas)
    engine = make_plain_engine(msgspec.structs.replace(pair.config, learner=learner))
    averages, gauges = Averages.begin(engine, learner), []
    for step in range(1, steps + 1):
        whole = replace(build(batches[step % 3], learner, vocabulary=MOST_IDS), step=step)
        gauges.append(update(engine, averages, whole, learner, note=note))
    return engine, gauges


def test_three_sgd_steps_equal_one_plain_ranks(
    pair: Pair, make_plain_engine: Callable[..., Any], batches: list[Batch], tmp_path: Path
) -> None:
    note = TokenFiles(tmp_path, 3, averages=True).write
    engine, gauges = plain(make_plain_engine, pair, batches, 3, "sgd", note)
    for name, weight in pair.weights("sgd").items():
        torch.testing.assert_close(engine.trainable()[name], weight, rtol=0, atol=1e-6)
    for facts in pair.facts:
        assert facts["norms"] == pytest.approx([g["learner/grad_norm"] for g in gauges], rel=1e-5)
        assert facts["losses"] == pytest.approx([g["learner/loss"] for g in gauges], abs=1e-6)
    for step in (1, 2, 3):  # the tokens of both are in the one file that rank 0 writes
        made, expected = (load_file(file_of(each, step)) for each in (pair.folder, tmp_path))
        torch.testing.assert_close(made, expected, rtol=2e-3, atol=2e-3, equal_nan=True)
    assert min(pair.facts[0]["norms"]) > pair.config.learner.max_grad_norm  # clipping acted


def test_twenty_adamw_steps_equal_one_plain_ranks(
    pair: Pair, make_plain_engine: Callable[..., Any], batches: list[Batch]
) -> None:
    engine, _ = plain(make_plain_engine, pair, batches, 20, "adamw")
    made = pair.weights("float32-20")
    # All weights together: the keys' biases have no gradient, and Adam steps on its rounding.
    expected = torch.cat([engine.trainable()[name].detach().flatten() for name in made])
    found = torch.cat([weight.flatten() for weight in made.values()])
    assert float((found - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_saved_average_scores_as_the_swapped_in_one(pair: Pair, dtype: str) -> None:
    assert all(facts[f"{dtype} off the saved"] <= 1e-6 for facts in pair.facts)


def test_the_saved_average_scores_the_same_in_another_process(pair: Pair) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair.folder / "float32" / "ema")
    for rank, share in enumerate(pair.shares):
        micro = share.micro_batches[0]
        expected, _, _ = TokenScorer(model)(micro.tokens, micro.loss_mask, 0.7)
        scores = load_file(pair.folder / f"float32-scores.{rank}")["scores"]
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lent_weights_come_back_bit_for_bit(pair: Pair, dtype: str) -> None:
    for facts in pair.facts:
        assert facts[f"{dtype} lent"] and facts[f"{dtype} given back"]
        assert facts[f"{dtype} scores given back"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_restored_ranks_go_on_bit_for_bit(pair: Pair, dtype: str) -> None:
    for facts in pair.facts:
        assert facts[f"{dtype} gauges again"] and facts[f"{dtype} weights again"]


def test_the_average_of_bf16_training_has_its_closed_form(pair: Pair) -> None:
    for facts in pair.facts:
        assert facts["dtype"] == "torch.bfloat16" and facts["closed form"] < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["model", "ema", "anchor"])
def test_exported_folders_hold_every_weight_once(pair: Pair, dtype: str, kind: str) -> None:
    saved = load_file(pair.folder / dtype / kind / "model.safetensors")
    expected = load_file(Path(pair.config.model.path) / "model.safetensors")
    assert {n: w.shape for n, w in saved.items()} == {n: w.shape for n, w in expected.items()}
    assert {weight.dtype for weight in saved.values()} == {getattr(torch, dtype)}
    if kind == "model":
        trained = pair.weights(f"{dtype}-exported")
        assert all(torch.equal(weight, trained[name]) for name, weight in saved.items())
