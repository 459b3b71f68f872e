"""Settings of a critic that would act on nothing are refused by name."""

import pytest

from configs.load import ConfigError, parse

PPO = ["learner.baseline=critic", "learner.advantage_std=whiten"]


def test_a_critic_is_configured() -> None:
    critic = parse("", [*PPO, "learner.critic.updates=2", "learner.critic.value_clip=0.5"], "test")
    assert critic.learner.critic.lr == 1e-5 and critic.learner.critic.value_clip == 0.5
    assert critic.learner.has_critic_model and not parse("", [], "test").learner.has_critic_model


def test_a_critic_may_be_the_policy_s_own() -> None:
    shared = parse("", [*PPO, "learner.critic.on=policy", "learner.critic.coef=0.5"], "test")
    assert shared.learner.critic.coef == 0.5 and not shared.learner.has_critic_model


@pytest.mark.parametrize(("alone", "total"), [(5, 6), (0, 1), (5, 0)])
def test_a_policy_that_learns_may_wait_for_its_critic(alone: int, total: int) -> None:
    steps = [f"learner.critic.alone_steps={alone}", f"learner.total_steps={total}"]
    assert parse("", [*PPO, *steps], "test").learner.critic.alone_steps == alone


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learner.critic.gamma=0.9"], "learner.critic.gamma = 0.9 acts on nothing with"),
        (["learner.baseline=critic"], "learner.advantage_std = 'group' is the spread of"),
        ([*PPO, "learner.turn_credit=1"], "learner.turn_credit = 1.0 with learner.baseline = 'cr"),
        ([*PPO, "learner.critic.value_clip=0.5"], "learner.critic.value_clip = 0.5 acts on"),
        (
            [*PPO, "learner.critic.value_clip=0.5", "learner.critic.on=policy"],
            "with learner.critic.on = 'policy', whose one step begins",
        ),
        (["learner.critic.on=policy"], "learner.critic.on = 'policy' acts on nothing with"),
        ([*PPO, "learner.critic.coef=0.5"], "learner.critic.coef = 0.5 acts on nothing with"),
        (
            [*PPO, "learner.critic.on=policy", "learner.critic.updates=2"],
            "learner.critic.updates = 2 with learner.critic.on = 'policy'",
        ),
        (
            [*PPO, "learner.critic.alone_steps=5", "learner.total_steps=5"],
            "learner.critic.alone_steps = 5 with learner.total_steps = 5, .*: lower that to 4",
        ),
        ([*PPO, "learner.critic.gamma=0"], "gamma"),
        ([*PPO, "learner.critic.gae_lambda=1.1"], "gae_lambda"),
    ],
)
def test_what_acts_on_nothing_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse("", overrides, "test")
