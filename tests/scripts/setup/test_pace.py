"""The pace that is reckoned of a run on GPUs."""

import pytest

from configs.load import load
from configs.runtime.process import REPOSITORY
from scripts.setup.gpu_memory import GIB
from scripts.setup.model_size import find_model
from scripts.setup.pace import LARGE, LARGEST, SMALL, Pace, speed_of

RECIPE = REPOSITORY / "configs" / "search_r1_7b_grpo.yaml"
QWEN_7B = find_model("Qwen2.5-7B")
CACHE = f"actors.kv_cache_bytes={40 * GIB}"


def pace(*overrides: str, gpus: int = 8) -> Pace:
    return Pace(load(RECIPE, [CACHE, *overrides]), QWEN_7B, 79 * GIB, gpus)


def test_it_is_what_a_hand_reckons() -> None:
    found, weights = pace(), 7_615_616_512
    assert found.kv_tokens == 40 * GIB // (2 * 2 * 28 * 4 * 128)
    assert (found.context_tokens, found.in_flight) == ((300 + 4596) // 2, 256)
    contexts = 256 * 2448
    assert found.token_s == pytest.approx(0.01 + (2 * weights + contexts * 57_344) / 1.6e12)
    assert found.turn_s == pytest.approx(500 * found.token_s + 1)
    learning = 255 * 2448 * 5 * 2 * weights / (4 * 125e12)
    assert found.step_s == pytest.approx(learning) and found.publish_s == 5 * found.step_s
    anew = contexts * 2 * weights / 125e12
    assert found.anew_share == pytest.approx(anew / (5 * learning))
    longest = 2500 * found.token_s + 4 + 4596 * 2 * weights / 125e12
    assert found.rollout_s == pytest.approx(longest + anew)


def test_caches_that_are_kept_cost_nothing() -> None:
    assert pace("weight_sync.in_flight=keep").anew_share == 0.0


def test_no_more_are_in_flight_than_are_admitted_hold_or_have_a_seat() -> None:
    synchronous = pace("replay.max_staleness=0", "weight_sync.publish_every=1")
    assert synchronous.in_flight == 255 // 4
    assert pace("actors.max_num_seqs=64").in_flight == 64
    assert pace(f"actors.kv_cache_bytes={5 * GIB}").in_flight == 5 * GIB // 57_344 // 2448


def test_who_shares_a_gpu_is_half_as_fast() -> None:
    apart, shared = pace(), pace(gpus=7)
    assert shared.prefill_s == 2 * apart.prefill_s and shared.step_s == 2 * apart.step_s


def test_workers_share_an_engines_weights_keys_and_values_out() -> None:
    one = pace("actors.count=1", "actors.max_num_seqs=64")
    two = pace("actors.count=1", "actors.max_num_seqs=64", "actors.tensor_parallel=2")
    assert two.kv_tokens == one.kv_tokens  # the bytes are all workers'
    assert two.prefill_s == one.prefill_s / 2 and two.anew_s == one.anew_s / 2
    assert two.token_s - 0.01 == pytest.approx((one.token_s - 0.01) / 2)


def test_keys_and_values_that_workers_hold_alike_count_for_each() -> None:
    def found(workers: int) -> Pace:
        words = [CACHE, f"actors.tensor_parallel={workers}", "actors.count=1"]
        return Pace(load(RECIPE, words), find_model("Qwen2.5-3B"), 79 * GIB, 8)

    assert found(2).kv_tokens == found(1).kv_tokens  # it has two heads of them
    assert found(8).kv_tokens == found(1).kv_tokens // 4


@pytest.mark.parametrize(("workers", "shares"), [(1, 1), (2, 1), (4, 2)])
def test_engines_of_several_gpus_each_share_them_where_they_are_too_few(
    workers: int, shares: int
) -> None:
    found = pace("actors.count=2", f"actors.tensor_parallel={workers}")
    assert found.prefill_s == shares * pace().prefill_s / workers


def test_actors_that_are_slower_than_the_learner_set_the_step() -> None:
    few = pace("actors.count=1", "actors.max_num_seqs=8", "learner.ranks=7")
    assert few.step_s == pytest.approx(255 * few.undisturbed_s / 2 / 8)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (0, []),
        (0, ["rejection=binary_kl", "rejection_bound=1"]),
        (1, ["rejection=mean_k3", "rejection_bound=1"]),
        (0, ["rejection=mean_k3", "rejection_bound=1", "proximal=ema"]),
        (1, ["behaviour_weight=mask", "behaviour_level=sequence"]),
        (1, ["objective=gspo"]),
        (0, ["objective=gspo", "proximal=start_of_update", "clip_high=null"]),
        (1, ["objective=reinforce", "proximal=ema", "behaviour_level=sequence", "clip_high=null"]),
        (1, ["guard=action", "guard_coef=.1"]),
        (1, ["baseline=critic", "advantage_std=whiten", "critic.on=policy"]),
    ],
)
def test_a_pass_more_is_counted_where_a_step_takes_one(more: int, words: list[str]) -> None:
    found = pace(*[f"learner.{word}" for word in words])
    averages = 1 + (found.config.learner.centre == "ema")  # the anchor's, and the centre's
    update = 3 + found.config.learner.gradient_checkpointing
    assert found.passes == update + averages + more


def test_a_gpu_is_as_fast_as_a_weak_one_of_its_size() -> None:
    assert [speed_of(gib * GIB) for gib in (22, 79, 139)] == [SMALL, LARGE, LARGEST]
