"""The environments of an evaluation, beside one another on one engine.

Consumes a configuration for each, an engine and who answers searches; produces what rolls a lease
out. The only place of an evaluation that knows how rollouts are made.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from actors.environment import Retriever
from actors.prompt import Prompter
from actors.rewards import Rewards
from actors.rollout import rollout
from actors.vllm_policy import VllmPolicy
from configs.schema import Config
from scripts.eval_rollouts import RollOut


def overrides_of(given: Sequence[str], base: Config) -> dict[str, list[str]]:
    """The overrides that make each environment of the configuration, by name; its own environment
    where none is given.
    """
    names = given or [base.environment.name]
    return {name: [f"environment.name={name}"] for name in names}


def roll_out_in(
    config: Config, policy: VllmPolicy, retriever: Retriever, tokenizer: Any
) -> RollOut:
    """What rolls leases out under the configuration's environment."""
    return partial(
        rollout,
        policy=policy,
        retriever=retriever,
        prompter=Prompter(tokenizer, config.questions, config.actors),
        rewards=Rewards(config.rewards),  # evaluations are scored by exact match
        config=config,
        actor_id="evaluation",
    )
