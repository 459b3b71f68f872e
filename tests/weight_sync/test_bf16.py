"""Learner and engine in bf16: rounding passes for twenty versions, a stale tensor does not."""

from pathlib import Path
from statistics import fmean

import pytest
import torch

from actors.policies.engine import prepare_environment
from scripts.bench.engine.probe import VERSIONS, bf16_config, followed
from scripts.demo.start import Recipe, make_model
from scripts.demo.tokenizer import save_tokenizer
from weight_sync.protocol import VerificationFailed


@pytest.fixture
def demo_model_path(tmp_path: Path) -> str:
    """The demo's model before its cold start, with weights that are far from uniform."""
    torch.manual_seed(0)
    model = make_model(Recipe())
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(6.0)
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model", Recipe().max_tokens)
    return str(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_rounding_passes_and_a_stale_tensor_does_not(
    demo_model_path: str, tmp_path: Path
) -> None:
    config = bf16_config(demo_model_path)
    prepare_environment(config)
    async with followed(config, tmp_path) as both:
        found = [await both.begin()]
        held = {name: weight.clone() for name, weight in both.learner.named_weights()}
        found += [await both.step() for _ in range(VERSIONS)]
        assert len(found) > VERSIONS and found[-1].refits == 0
        mean, largest = fmean(each.mean for each in found), max(each.largest for each in found)
        print(f"probe over {len(found)} versions in bf16: mean {mean:.4f}, largest {largest:.4f}")
        assert mean < 0.1
        head = "model.embed_tokens.weight"  # the two are tied
        stale = dict(both.learner.named_weights()) | {head: held[head]}
        with pytest.raises(VerificationFailed, match="log-probs are not the learner's"):
            await both.publish(stale.items())
