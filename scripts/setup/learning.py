"""Checks of what a run learns from, how it is followed, and which checkpoint is its best."""

import importlib.util
import sys
from collections.abc import Iterator

from configs.rewards import ALWAYS_EVALUATED
from configs.schema import Config
from configs.sentinels import NO_GROUPS, SentinelsConfig
from replay.questions import questions_of, sets_of

_NOT_OF_WEIGHTS = {"mismatch": "the engine", "empty_searches": "retrieval"}


def signal(config: Config) -> Iterator[str]:
    """Yield the contradictions that leave a rollout nothing to be compared with."""
    baseline, replay = config.learner.baseline, config.replay
    if not config.learner.total_steps:
        return
    if baseline == "leave_one_out" and replay.group_size == 1:
        yield (
            "replay.group_size = 1 with learner.baseline = 'leave_one_out': without it no sibling "
            "is left: give 2 or more, or take learner.baseline=none learner.advantage_std=whiten"
        )
    elif baseline in ("mean", "optimal") and replay.group_size == 1:
        yield (
            "replay.group_size = 1: an advantage is a reward less the mean of its group's, which "
            "is always 0 in a group of one, and nothing would be learned: give 2 or more, or "
            "learner.baseline=critic"
        )
    elif replay.drop_no_signal and replay.group_size == 1:
        yield (
            "replay.drop_no_signal = True with replay.group_size = 1: a group of one has equal "
            "rewards, and every one would be dropped: set it to false"
        )
    elif replay.drop_no_signal and baseline == "none":
        yield (
            "replay.drop_no_signal = True with learner.baseline = 'none': equal rewards are a "
            "signal there: set it to false"
        )
    elif replay.drop_no_signal and baseline != "critic" and (by := _signal_of_equals(config)):
        yield (
            f"replay.drop_no_signal = True with {by}: it gives groups of equal rewards a signal, "
            "and these would be dropped: set it to false"
        )


def _signal_of_equals(config: Config) -> str:
    """The setting by which a group of equal rewards teaches; empty where none does."""
    if config.learner.kl_in == "reward":
        return "learner.kl_in = 'reward'"
    turn_credit = config.learner.turn_credit
    return f"learner.turn_credit = {turn_credit!r}" if turn_credit else ""


def no_signal(config: Config) -> Iterator[str]:
    """Yield a sentinel's action that nothing sets off."""
    action, baseline = config.sentinels.no_signal, config.learner.baseline
    if baseline in NO_GROUPS and action in ("stop", "rollback"):
        yield (
            f"sentinels.no_signal = {action!r} acts on nothing with learner.baseline = "
            f"{baseline!r}, which learns from groups of equal rewards too: set it to 'warn', or "
            "take another rule"
        )


def best(config: Config) -> Iterator[str]:
    """Yield why no evaluation would tell what `learner.best` names; questions that cannot be read
    are named elsewhere.
    """
    field = f"learner.best = {(named := config.learner.best)!r}"
    name, _, part = named.rpartition("/")
    if part not in (*ALWAYS_EVALUATED, *(told := config.rewards.evaluated)):
        yield f"{field}: evaluations do not score it: rewards.evaluated={','.join([*told, part])}"
    if not name or not config.questions.eval:
        return
    try:
        sets = sets_of(questions_of(config, "eval").questions)
    except (ValueError, OSError):
        return
    if name not in sets:
        known = f"only {', '.join(sets)}" if sets else "none that is named (data_source)"
        yield f"{field}: questions.eval has no data set {name!r}, {known}: name another"


def trackers(config: Config) -> Iterator[str]:
    """Yield the trackers whose packages are not here."""
    named = list(config.learner.trackers)
    for name in named:
        spec = importlib.util.find_spec(name)
        if name != "tensorboard" and (spec is None or spec.origin is None):  # a folder of its name
            yield (
                f"learner.trackers = {named!r}: {name} is not installed here: {sys.executable} -m "
                f"pip install {name}, or leave it out"
            )
    if not config.learner.tracker_project.strip():
        project = config.learner.tracker_project
        yield f"learner.tracker_project = {project!r} is no name: give one, or leave it out"


def rollbacks(config: Config) -> Iterator[str]:
    """Yield the sentinels that no older weights would quieten."""
    for rule, cause in _NOT_OF_WEIGHTS.items():
        if rule in config.sentinels.roll_back:
            yield (
                f"sentinels.{rule} = 'rollback': older weights do not mend {cause}: set it to "
                "'stop' or 'warn'"
            )


def idle_rollbacks(config: Config) -> Iterator[str]:
    """Yield what is set of rollbacks where no sentinel makes any. (A run that goes on may have had
    one that did.)
    """
    given, usual = config.sentinels, SentinelsConfig()
    for field in ("rollback_rate", "rollbacks") if not given.roll_back else ():
        if (value := getattr(given, field)) != getattr(usual, field):
            yield (
                f"sentinels.{field} = {value!r} acts on nothing where no sentinel is 'rollback': "
                "set one, for example sentinels.ess=rollback, or leave it out"
            )


CHECKS = (signal, no_signal, best, trackers, rollbacks)
