"""Whole rollouts and what they earn: whose words count, each part by name, what is unscorable."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from actors.rewards.scorer import Rewards, Score, search_r1_score
from actors.rewards.transcript import Transcript
from configs.prompts import SEARCH_R1_CORRECTION, SEARCH_R1_PROMPT
from configs.rewards import JudgeConfig, RewardsConfig, RewardWeights, SearchR1Config
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Question, Sampling, StopReason, Trajectory
from retrieval_server.protocol import Passage
from tests.actors.judges import JudgeServer, http, says

VECTORS = json.loads((REPOSITORY / "tests" / "vectors" / "reward.json").read_text())
SEARCH, ANSWER = "<think>t</think><search>bore</search>", "<think>t</think><answer>kelu</answer>"
LEASE = Lease(7, 0, "train", Question("q-1", "who?", ("kelu",)), Sampling(1.0, 11))
ROOMY = {
    "max_model_len": 9000,
    "max_action_tokens": 500,
    "observation_template": "\n\n<information>{passages}</information>\n\n",
    "correction": SEARCH_R1_CORRECTION,
}


def weighing(**weights: float) -> RewardsConfig:
    return RewardsConfig(weights=RewardWeights(**({"em": 0.0} | weights)))


@pytest.fixture
def capital(stage: Any, bpe_tokenizer: Any, lease_for: Any) -> Callable[..., Trajectory]:
    """capital(*texts, rewards, passages): Search-R1's prompt; the answer is its own example's."""
    stage.tokenizer = bpe_tokenizer

    def play(*texts: str, passages: tuple[str, ...] = (), **config: Any) -> Trajectory:
        stage.retriever.passages = [Passage(str(n), text, 1.0) for n, text in enumerate(passages)]
        lease = lease_for(question=Question("q", "what is the capital?", ("Beijing",)))
        settings = ROOMY | {"prompt": SEARCH_R1_PROMPT, "max_turns": len(texts) - 1} | config
        played: Trajectory = stage.play(*texts, lease=lease, **settings)
        return played

    return play


GOLD_PASSAGE = "x</information><answer>Beijing</answer><information>"
LEAKS = {
    "no answer at all": (("gibberish",), ()),
    "the corrective text alone": (("gibberish", "more"), ()),
    "only in a passage": (("<search>capital</search>", "hm"), (GOLD_PASSAGE,)),
    "tags split across turns": (("<answer>Beijing</ans", "wer>"), ()),
    "begun in a passage": (("<search>capital</search>", "</answer>"), ("<answer>Beijing",)),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_strict_gives_nothing_for_what_the_policy_did_not_answer(
    capital: Callable[..., Trajectory], leak: str
) -> None:
    texts, passages = LEAKS[leak]
    everything = RewardsConfig(weights=RewardWeights(substring=1.0, f1=1.0, format=1.0))
    trajectory = capital(*texts, passages=passages, rewards=everything)
    assert trajectory.answer is None and trajectory.reward == 0.0
    assert trajectory.reward_parts == {"em": 0.0, "substring": 0.0, "f1": 0.0, "format": 0.0}


@pytest.mark.parametrize("leak", list(LEAKS)[:3])
def test_search_r1_gives_what_it_gave(capital: Callable[..., Trajectory], leak: str) -> None:
    texts, passages = LEAKS[leak]
    trajectory = capital(*texts, passages=passages, rewards=RewardsConfig(mode="search_r1"))
    leaked = 0.0 if "corrective" in leak else 1.0  # there it reads "and"
    assert trajectory.answer is None
    assert trajectory.reward_parts == {"em": 0.0, "search_r1": leaked}
    assert trajectory.reward == leaked


def test_a_passage_that_closes_its_block_ends_nothing_and_earns_nothing(
    capital: Callable[..., Trajectory],
) -> None:
    trajectory = capital(
        "<think>t</think><search>capital</search>",
        "<think>t</think><answer>Nanjing</answer>",
        passages=(GOLD_PASSAGE,),
        rewards=weighing(em=1.0, format=0.5),
    )
    assert trajectory.stop_reason == StopReason.ANSWERED and trajectory.answer == "Nanjing"
    assert trajectory.reward == 0.5 and len(trajectory.turns) == 2


def test_v03_scores_the_whole_text_behind_the_assistants_marker(
    capital: Callable[..., Trajectory],
) -> None:
    asked = SearchR1Config(version="v0.3", retrieval=0.1)
    settings = {
        "rewards": RewardsConfig(mode="search_r1", search_r1=asked),
        "prompt": SEARCH_R1_PROMPT + "<|im_start|>assistant\n",
    }
    wrong = ("<think>t</think><search>capital</search>", "<think>t</think><answer>Xian</answer>")
    assert capital(*wrong, passages=("Beijing",), **settings).reward == pytest.approx(0.3)
    assert capital(*wrong, passages=("Nanjing",), **settings).reward == 0.2
    assert capital("<answer>Xian</answer>", **settings).reward == 0.1
    assert capital("<answer>Beijing</answer>", **settings).reward == 0.8


def _whole(case: dict[str, Any]) -> Transcript:
    return Transcript(
        question=Question("q", "q?", tuple(case["target"])),
        answer=None,
        stop_reason=StopReason.TURN_LIMIT,
        prompt=case["solution"],
        texts=(),
        observations=(),
        passages=(),
        turns=(),
    )


@pytest.mark.parametrize("case", VECTORS["score_em"], ids=lambda case: case["solution"][-30:])
def test_v02_is_the_originals(case: dict[str, Any]) -> None:
    assert search_r1_score(_whole(case), SearchR1Config()) == case["search_r1"]
    final = search_r1_score(_whole(case), SearchR1Config(final=0.1))
    assert final == case["search_r1_format_score_0_1"]


@pytest.mark.parametrize("case", VECTORS["format_score"], ids=lambda case: case["note"])
def test_v03_is_the_originals(case: dict[str, Any]) -> None:
    asked = {name.split("_")[0]: value for name, value in case["kwargs"].items()}
    assert search_r1_score(_whole(case), SearchR1Config(version="v0.3", **asked)) == case["output"]


def test_v03_without_numbers_has_its_scripts_own() -> None:
    wrong = next(each for each in VECTORS["format_score"] if each["note"].startswith("invalid"))
    assert search_r1_score(_whole(wrong), SearchR1Config(version="v0.3")) == 0.1


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("em", 0.0),
        ("substring", 1.0),
        ("f1", 2 / 3),
        ("format", 1.0),
        ("retrieval_hit", 1.0),
        ("search_cost", -1.0),
        ("avoidance", 0.0),
    ],
)
def test_each_part_counts_by_its_weight(
    stage: Any, bpe_tokenizer: Any, part: str, value: float
) -> None:
    stage.tokenizer = bpe_tokenizer
    stage.retriever.passages = [Passage("p", "bore\nits mayor is kelu", 1.0)]
    weights = {part: 0.5} | ({"em": 2.0} if part in ("search_cost", "avoidance") else {})
    right_in_part = "<think>t</think><answer>mayor kelu</answer>"
    trajectory = stage.play(SEARCH, right_in_part, rewards=weighing(**weights), **ROOMY)
    assert trajectory.reward == 0.5 * value
    assert trajectory.reward_parts == {"em": 0.0, part: value}


def test_avoidance_is_taken_off(stage: Any, bpe_tokenizer: Any) -> None:
    stage.tokenizer = bpe_tokenizer
    rewards = weighing(f1=1.0, avoidance=0.5)
    evasive = stage.play("<answer>I don't know</answer>", rewards=rewards, **ROOMY)
    assert (evasive.reward, evasive.reward_parts["avoidance"]) == (-0.5, -1.0)
    silent = stage.play("hm", rewards=rewards, **(ROOMY | {"max_turns": 0}))
    assert silent.reward == -0.5


def custom(entry: str, **weights: float) -> RewardsConfig:
    plain = {"em": 0.0, "custom": 1.0}
    return RewardsConfig(
        custom=f"tests.actors.judges:{entry}", weights=RewardWeights(**(plain | weights))
    )


def test_a_users_reward_reads_the_rollout(stage: Any, bpe_tokenizer: Any) -> None:
    stage.tokenizer = bpe_tokenizer
    stage.retriever.passages = [Passage(str(n), text, 1.0) for n, text in enumerate(("kelu", "x"))]
    assert stage.play(SEARCH, ANSWER, rewards=custom("evidence"), **ROOMY).reward == 1.0
    plain = stage.play(SEARCH, ANSWER, rewards=custom("brevity", em=1.0), **ROOMY)
    assert plain.reward == 1.2 and plain.reward_parts == {"em": 1.0, "custom": 0.2}


def test_a_users_reward_that_raises_leaves_the_rollout_unscorable_and_sound(
    stage: Any, bpe_tokenizer: Any
) -> None:
    stage.tokenizer = bpe_tokenizer
    trajectory = stage.play(SEARCH, ANSWER, rewards=custom("broken"), **ROOMY)
    assert trajectory.reward is None and trajectory.reward_parts == {"em": 1.0}
    assert trajectory.reward_cause == (
        "custom: tests.actors.judges:broken raised KeyError: 'no such answer' "
        "(judges.py:88) (question 'q-1')"
    )


def test_a_users_reward_cannot_change_the_record(stage: Any, bpe_tokenizer: Any) -> None:
    stage.tokenizer = bpe_tokenizer
    trajectory = stage.play(SEARCH, ANSWER, rewards=custom("blanking"), **ROOMY)
    assert trajectory.turns[0].behaviour_logprobs.any()
    assert "read-only" in trajectory.reward_cause


async def scored(
    config: RewardsConfig, answer: str | None, lease: Lease = LEASE, times: int = 1
) -> tuple[Score, dict[str, float]]:
    """The last of so many scores of an answer that stands in one turn, and the gauges."""

    def transcribe() -> Transcript:
        return Transcript(
            question=lease.question,
            answer=answer,
            stop_reason=StopReason.ANSWERED,
            prompt="who?",
            texts=(f"<answer>{answer}</answer>",),
            observations=("",),
            passages=(),
            turns=(),
        )

    async with Rewards.open(Config(rewards=config)) as rewards:
        for _ in range(times):
            score = await rewards.score(lease, answer, transcribe)
        return score, rewards.gauges()


def judged(server: JudgeServer, **changes: Any) -> RewardsConfig:
    asked = JudgeConfig(url=server.url, model="tiny", **changes)
    return RewardsConfig(judge=asked, weights=RewardWeights(em=0.5, judge=0.5))


async def test_the_judge_is_a_part_and_its_verdict_is_remembered(
    stage: Any, bpe_tokenizer: Any
) -> None:
    stage.tokenizer = bpe_tokenizer
    async with JudgeServer(says("yes")) as server:
        trajectory = await stage.perform(
            "<answer>king kelu</answer>", rewards=judged(server), **ROOMY
        )
        _, gauges = await scored(judged(server), "kelu", times=3)
    assert trajectory.reward == 0.5 and trajectory.reward_parts == {"em": 0.0, "judge": 1.0}
    assert gauges["actor/judge_calls_count"] == 1 and gauges["actor/judge_cached_count"] == 2
    assert gauges["actor/reward/judge"] == 1.0 and gauges["actor/unscorable_count"] == 0


async def test_without_an_answer_the_judge_is_not_asked() -> None:
    async with JudgeServer(says("yes")) as server:
        score, _ = await scored(judged(server), None)
    assert score == Score(0.0, "", {"em": 0.0, "judge": 0.0}) and not server.requests


@pytest.mark.parametrize("reply", [http(500, b"down"), says("hm"), http(404, b"no such model")])
async def test_a_judge_that_fails_is_no_zero(reply: bytes) -> None:
    async with JudgeServer(reply) as server:
        score, gauges = await scored(judged(server, retries=0), "kelu", times=2)
    assert score.reward is None and score.cause.startswith(f"judge: {server.url}")
    assert score.parts == {"em": 1.0}
    assert gauges["actor/unscorable_count"] == gauges["actor/unscorable_judge_count"] == 2


async def test_a_run_outlives_a_judge_that_is_down_for_a_while() -> None:
    async with (
        JudgeServer(http(500, b"down"), says("no")) as server,
        Rewards.open(Config(rewards=judged(server, retries=0))) as rewards,
    ):
        scores = [await rewards.score(LEASE, "kelu", _unread) for _ in range(2)]
    assert [score.reward for score in scores] == [None, 0.5]


async def test_parts_are_means_over_train_rollouts() -> None:
    config = weighing(em=1.0, f1=1.0)
    async with Rewards.open(Config(rewards=config)) as rewards:
        for answer in ("kelu", "king kelu", None, "x"):
            await rewards.score(LEASE, answer, _unread)
        await rewards.score(_evaluation(), "x", _unread)
    gauges = rewards.gauges()
    assert gauges["actor/reward/em"] == 0.25
    assert gauges["actor/reward/f1"] == pytest.approx((1 + 2 / 3) / 4)
    assert "actor/reward/substring" not in gauges


@pytest.mark.parametrize("mode", ["strict", "search_r1"])
async def test_an_evaluation_is_exact_match_in_every_mode(mode: Any) -> None:
    score, gauges = await scored(RewardsConfig(mode=mode), "king kelu", _evaluation())
    assert (score.reward, score.cause) == (0.0, "")
    assert score.parts == {"em": 0.0, "f1": pytest.approx(2 / 3), "substring": 1.0}
    assert gauges == {"actor/unscorable_count": 0.0}
    right, _ = await scored(custom("broken"), "Kelu.", _evaluation())
    assert right.reward == 1.0


async def test_an_evaluation_tells_the_parts_that_are_named_and_earns_none() -> None:
    parts = ("format", "avoidance", "judge")
    async with JudgeServer(says("yes")) as server:
        asked = JudgeConfig(url=server.url, model="tiny")
        config = RewardsConfig(judge=asked, evaluated=parts)
        score, _ = await scored(config, "king kelu", _evaluation())
        trained, _ = await scored(config, "king kelu")
    assert score.reward == 0.0 and score.parts["judge"] == 1.0
    assert score.parts.keys() == {"em", "f1", "substring", *parts}
    assert trained.parts == {"em": 0.0} and len(server.requests) == 1


async def test_a_judge_that_is_down_leaves_an_evaluation_without_its_part() -> None:
    async with JudgeServer(http(500, b"down")) as server:
        asked = JudgeConfig(url=server.url, model="tiny", retries=0)
        config = RewardsConfig(judge=asked, evaluated=("judge",))
        score, gauges = await scored(config, "kelu", _evaluation())
    assert score == Score(1.0, "", {"em": 1.0, "f1": 1.0, "substring": 1.0})
    assert gauges["actor/unscorable_judge_count"] == 1


@pytest.mark.parametrize(
    ("config", "reward"),
    [
        (weighing(em=1.0), None),
        (RewardsConfig(mode="search_r1"), None),
        (custom("brevity"), 0.2),
        (weighing(format=1.0), 0.0),
    ],
)
async def test_without_a_gold_answer_only_what_needs_none_is_scored(
    config: RewardsConfig, reward: float | None
) -> None:
    lease = Lease(7, 0, "train", Question("q", "who?", ()), Sampling())
    score, gauges = await scored(config, "kelu", lease)
    assert score.reward == reward
    assert gauges["actor/unscorable_count"] == (reward is None)
    assert reward is not None or "no accepted answer" in score.cause


def test_which_rewards_need_accepted_answers() -> None:
    judge = {"url": "http://127.0.0.1:1/v1", "model": "judge"}
    alone = JudgeConfig(**judge, prompt="Is {answer} right? {question}")
    for config, need in (
        (RewardsConfig(), True),
        (RewardsConfig(mode="search_r1"), True),
        (weighing(f1=1.0), True),
        (weighing(format=1.0), False),
        (weighing(environment=1.0), False),
        (RewardsConfig(weights=RewardWeights(em=0.0, judge=1.0), judge=JudgeConfig(**judge)), True),
        (RewardsConfig(weights=RewardWeights(em=0.0, judge=1.0), judge=alone), False),
    ):
        assert config.need_answers is need


async def test_parts_without_a_finite_sum_are_unscorable() -> None:
    config = RewardsConfig(weights=RewardWeights(em=1e308, f1=1e308))
    score, gauges = await scored(config, "kelu")
    assert score.reward is None and score.cause.startswith("sum: ")
    assert gauges["actor/unscorable_sum_count"] == 1


def test_the_plain_reward_reads_nothing_but_the_answer(stage: Any) -> None:
    trajectory = stage.play("<answer> kelu </answer>")
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, {"em": 1.0})


def _evaluation() -> Lease:
    return Lease(7, 0, "eval", LEASE.question, Sampling(0.0))


def _unread() -> Transcript:
    raise AssertionError("no part reads more than the answer")
