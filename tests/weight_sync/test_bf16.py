"""Learner and engine in bf16: rounding passes for twenty versions; of tensors left twenty versions
stale the probe sees those that move log-probs by more than the start's rounding, and no others.
"""

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import pytest
import torch

from actors.policies.engine import prepare_environment
from scripts.bench.engine.probe import VERSIONS, Followed, bf16_config, followed
from scripts.demo.start import Recipe, make_model
from scripts.demo.tokenizer import save_tokenizer
from weight_sync.probe import FACTOR
from weight_sync.protocol import VerificationFailed

# What the probe does not see, and why: queries alone change what is attended to a little, and a
# norm's weights move by less than bf16 resolves. The checksums of several actors do.
UNSEEN = ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight")
SEEN = "model.embed_tokens.weight"  # tied to the head


def planted(
    both: Followed, held: dict[str, torch.Tensor], *names: str
) -> Iterable[tuple[str, torch.Tensor]]:
    """The learner's weights, but for these, which are as they were held."""
    current = dict(both.learner.named_weights())
    assert not any(torch.equal(current[name], held[name]) for name in names)
    return (current | {name: held[name] for name in names}).items()


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
async def test_rounding_passes_and_so_does_what_moves_no_log_prob_more(
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
        for name in UNSEEN:
            passed = await both.publish(planted(both, held, name))
            print(f"{name}, {VERSIONS} versions stale: mean {passed.mean:.4f}")
            assert passed.refits == 0 and passed.mean < FACTOR * found[0].mean
        with pytest.raises(VerificationFailed, match="log-probs are not the learner's") as failed:
            await both.publish(planted(both, held, SEEN))
        print(failed.value)
