"""One actor's process: `python -m actors.worker CONFIG --actor-id actor-0 [a.b=c …]`, or, to join a
running run from anywhere: `python -m actors.worker --connect ENDPOINT [--keys FOLDER] [a.b=c …]`.

Consumes leases from replay, weights from the learner and passages from the retrieval server, or
from a recorded run's log; produces trajectories, failed leases and gauges. Starts the engine, joins
weight sync, and asks for leases only once verified weights serve. Ends with 0 after Stop, SIGTERM
or SIGINT (drained, Goodbye said), and sooner after MAKE_WAY; with 2, and a message, when its input
cannot be used; with 1 on a named error: replay or the learner silent, the engine dead. Killed, it
takes the engine's process with it.
"""

import argparse
import asyncio
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Numpy would start threads that nothing here uses, and the engine could not be forked off.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from actors import joining
from actors.environments import registry
from actors.errors import ActorError, EngineUnusable
from actors.gateway import program
from actors.gateway.rolling import rolling
from actors.policies import engine_keys
from actors.policies.capacity import Capacity, mean_context
from actors.policies.engine import (
    check_installation,
    lower_priority,
    prepare_environment,
)
from actors.policies.vllm import VllmPolicy
from actors.prompt import Prompter, load_tokenizer, tokenizer_digest
from actors.retrieval import Retrieval, open_retrieval
from actors.rewards.scorer import Rewards
from actors.runner import MeteredPolicy, Runner, SteadyPolicy, VerifiedVersions, verifying_s
from actors.statement import Statement
from configs.keys import ACTOR, Address, Addresses
from configs.load import ConfigError, load
from configs.runtime.node import own_node
from configs.runtime.process import (
    Exit,
    announce_ready,
    announce_waiting,
    begin,
    die_with_parent,
    leave,
    loop_factory,
)
from configs.runtime.signals import MAKE_WAY, on_stop
from configs.schema import Config
from configs.trust import FLAG, TRUSTING
from replay.clients.actor import TrajectoryWriter
from replay.protocol import Hello, ReplayError, ReplayTimeout
from replay.trajectory import Question
from weight_sync.adapter import adapter_of
from weight_sync.protocol import PeerFailed, SyncTimeout, TransportFailed, WeightSyncError
from weight_sync.subscriber import Subscriber

if __name__ == "__mp_main__":  # the engine's spawned child imports its parent's main module first
    die_with_parent()

logger = logging.getLogger(__name__)
OTHERS_FAULTS = (ReplayTimeout, PeerFailed, TransportFailed, SyncTimeout)


async def run(config: Config, actor_id: str) -> None:
    """Start the engine, serve until stopped, drain. Raises (groups of) named errors."""
    tokenizer = _tokenizer(config)
    prompter = Prompter(tokenizer, config.questions, config.actors)
    registry.check(config, prompter)
    program.check(config)
    hello = Hello(actor_id, tokenizer_digest(tokenizer), node=own_node())
    retriever, rewards, replay = open_retrieval(config), Rewards.open(config), config.replay
    addresses = Addresses.of(config)
    if addresses.keys:
        addresses.keys.check(ACTOR)  # before the engine takes its time
    number = _planned(actor_id, addresses.weight_sync)
    policy = await VllmPolicy.start(config, number=number, adapter=adapter_of(config))
    logger.info("engine ready with %s", config.model.path)
    try:
        async with (
            retriever,
            rewards,
            TrajectoryWriter(
                addresses.replay.endpoint,
                hello,
                replay.heartbeat_s,
                replay.dead_after_s,
                keys=addresses.replay.keys,
                restart_deadline_s=replay.restart_deadline_s,
            ) as writer,
        ):
            learner = addresses.weight_sync
            await _serve(
                config, hello.actor_id, policy, prompter, retriever, rewards, writer, learner
            )
    finally:
        policy.close()


def _planned(actor_id: str, learner: Address) -> int | None:
    """The number of an actor that the launcher names, on the host whose GPUs it has planned; else
    None: this host's GPUs are in no plan.
    """
    number = re.fullmatch(r"actor-(\d+)", actor_id)
    return int(number[1]) if number and joining.on_this_host(learner.endpoint) else None


async def _serve(
    config: Config,
    actor_id: str,
    policy: VllmPolicy,
    prompter: Prompter,
    retriever: Retrieval,
    rewards: Rewards,
    writer: TrajectoryWriter,
    learner: Address,
) -> None:
    subscriber = Subscriber(
        actor_id, learner.endpoint, policy, config.weight_sync, keys=learner.keys
    )
    meter, versions = MeteredPolicy(policy), VerifiedVersions(subscriber.serving)
    subscriber.on_verified, subscriber.on_loaded = versions.add, versions.forget
    async with rolling(
        config,
        policy=SteadyPolicy(meter, versions),
        prompter=prompter,
        rewards=rewards,
        actor_id=actor_id,
        verified=partial(versions.passed, deadline_s=verifying_s(config)),
    ) as rollouts:
        runner = Runner(
            rollouts.roll,
            retriever=retriever,
            writer=writer,
            versions=versions,
            meter=meter,
            config=config,
        )
        capacity = _capacity(config, prompter, policy.statistics.kv_tokens)
        statement = Statement(writer, versions.announcements, capacity, policy.statistics, runner)
        statement.on_first = _first_served
        sources = (runner, retriever, rewards, subscriber, policy, rollouts, statement)
        writer.gauges = lambda: {k: v for each in sources for k, v in each.gauges().items()}
        _stop_on_signals(runner)
        _awaits_weights(learner.endpoint)
        cause = await _run_beside(runner, subscriber.run(), policy.watch(), statement.run())
        logger.info("drained: %s", cause)


async def _run_beside(runner: Runner, *helpers: Coroutine[Any, Any, None]) -> str:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in helpers]
        cause = await runner.run()
        for task in tasks:
            task.cancel()
    return cause


def _capacity(config: Config, prompter: Prompter, kv_tokens: int) -> Capacity:
    """Reckon the first capacity."""
    prompt = len(prompter.question(Question("", "", ())))  # its words are few beside the template
    return Capacity.of(
        kv_tokens,
        mean_context(prompt, config.model.max_model_len),
        config.actors.max_num_seqs,
        config.replay.group_size,
        config.actors.rollouts_in_flight,
    )


def _awaits_weights(endpoint: str) -> None:
    announce_waiting()
    logger.info("waiting for the first weights from %s", endpoint)


def _first_served() -> None:
    lower_priority()
    announce_ready()


def _stop_on_signals(runner: Runner) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, runner.stop, number.name)
    loop.add_signal_handler(MAKE_WAY, runner.make_way, MAKE_WAY.name)


def _tokenizer(config: Config) -> Any:
    path = config.model.path
    if not Path(path, "config.json").is_file():
        raise ConfigError(f"model.path = {path!r}: no model there: name a Hugging Face folder")
    try:
        return load_tokenizer(path, config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {path!r}: no usable tokenizer there: {error}") from error


def main(arguments: Sequence[str]) -> int:
    """Run one actor; return the exit code."""
    given = _parsed(arguments)
    on_stop(lambda _cause: sys.exit(Exit.DONE))  # until there is a loop, which drains
    code = Exit.DONE
    try:
        begin(given.actor_id)
        config = _configuration(given)
        check_installation()
        prepare_environment(config)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run(config, given.actor_id))
    except* (ConfigError, EngineUnusable) as group:
        code = _report(given.actor_id, group, Exit.BAD_INPUT)
    except* (ActorError, ReplayError, WeightSyncError) as group:
        own = group.split(OTHERS_FAULTS)[1]
        code = _report(given.actor_id, group, Exit.FAILED if own else Exit.CONSEQUENCE)
    return code


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m actors.worker")
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="the run's config.yaml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--connect", metavar="ENDPOINT", help="of the replay whose run to join")
    parser.add_argument("--keys", metavar="FOLDER", default="", help="a copy of the run's keys")
    parser.add_argument(FLAG, action="store_true", help=f"with --connect: {TRUSTING}")
    parser.add_argument("--actor-id", metavar="NAME", help="with --connect: HOSTNAME-PID if absent")
    given = parser.parse_intermixed_args(arguments)
    first, connect = given.config, given.connect
    if connect and first and "=" in first and not Path(first).exists():
        given.config, given.overrides = None, [first, *given.overrides]
    if connect and given.config:
        parser.error(f"CONFIG {first!r} and --connect {connect!r}: each names a run: drop one")
    if not connect and not given.config:
        parser.error("name the run: CONFIG, or --connect ENDPOINT to join one")
    if not connect and not given.actor_id:
        parser.error("--actor-id is missing: name this actor, for example --actor-id actor-0")
    if not connect and given.keys:
        parser.error(f"--keys {given.keys!r} is for --connect: with CONFIG, say keys={given.keys}")
    if given.trust and not connect:
        parser.error(f"{FLAG} is for --connect: a CONFIG that you name is trusted")
    if connect and re.fullmatch(r"actor-\d+", given.actor_id or ""):
        parser.error(
            f"--actor-id {given.actor_id!r}: such names are the launcher's own: choose one"
        )
    given.actor_id = given.actor_id or f"{socket.gethostname()}-{os.getpid()}"
    return given


def _configuration(given: argparse.Namespace) -> Config:
    if given.connect:
        config = joining.configuration(
            given.connect, given.keys, given.overrides, trusted=given.trust
        )
    else:
        config = load(given.config, given.overrides)
        if problems := [*engine_keys.problems(config)]:
            raise ConfigError("\n".join(problems))
    if not config.actors.kv_cache_bytes:
        raise ConfigError(
            "actors.kv_cache_bytes = 0: it is found when a run is prepared (forage train): give "
            "the bytes of keys and values that this actor's engine may hold"
        )
    return config


def _report(actor_id: str, group: BaseExceptionGroup[Exception], code: Exit) -> Exit:
    lines = (f"{actor_id}: {type(error).__name__}: {error}" for error in _leaves(group))
    for line in dict.fromkeys(lines):  # each rollout has its own
        print(line, file=sys.stderr)
    return code


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
