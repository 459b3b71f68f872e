"""A model behind the gateway by hand: what a program's calls meet in training, without a run.

One engine serves `model.path` as it is. A key is printed, with lines that use it; a call's own
temperature and seed hold, and nothing is recorded.
"""

import asyncio
import signal
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial

from actors.gateway.server import Gateway
from actors.policies.engine import check_installation, prepare_environment
from actors.policies.vllm import VllmPolicy
from actors.prompt import Prompter
from configs.load import ConfigError, load
from configs.runtime.process import loop_factory
from configs.runtime.signals import Interrupt
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Question, Sampling
from scripts.ask.ask import tokenizer_of
from scripts.options import Options, argument, option, overrides
from scripts.setup import preflight
from scripts.setup.fit import fitted_alone
from scripts.setup.hub import with_hub_paths

_BY_HAND = Question("by-hand", "", ())
_CHAT = (
    "chat/completions",
    '"messages": [{"role": "user", "content": "Hello"}]',
    'chat.completions.create(model="policy",\n'
    '  messages=[{"role": "user", "content": "Hello"}]).choices[0].message.content)',
)
_TEXT = (
    "completions",
    '"prompt": "Hello", "max_tokens": 16',
    'completions.create(model="policy",\n  prompt="Hello", max_tokens=16).choices[0].text)',
)


@dataclass(frozen=True)
class GatewayOptions(Options):
    config: str = argument("a YAML configuration", metavar="CONFIG")
    overrides: tuple[str, ...] = overrides()
    port: int = option("of 127.0.0.1 (default 0: any free one)", default=0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port >= 1 << 16:
            raise ConfigError(f"--port {self.port}: at most {(1 << 16) - 1}")


def gateway(options: GatewayOptions) -> None:
    """Check, start the engine, serve until Ctrl-C. Raises ConfigError, ActorError."""
    with Interrupt():
        check_installation()
        config = with_hub_paths(load(options.config, options.overrides), ("model.path",))
        preflight.check_parts(config, model=True, retrieval=False, environment=False)
        config = fitted_alone(config)
        prepare_environment(config)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(config, options.port))


async def _serve(config: Config, port: int) -> None:
    prompter = Prompter(tokenizer_of(config), config.questions, config.actors)
    print(f"starting an engine with {config.model.path}", file=sys.stderr, flush=True)
    policy = await VllmPolicy.start(config)
    try:
        await policy.set_policy_version(0)
        gateway = await Gateway.start(policy, prompter, config, _as_loaded, port)
        sampling = Sampling(config.actors.temperature, config.seed)
        session = gateway.open(Lease(0, 0, "train", _BY_HAND, sampling), free=True)
        print("\n".join(_lines(gateway.url, session.key, prompter.has_chat_template)), flush=True)
        try:
            await _until_stopped(policy)
        finally:
            await gateway.close()
    finally:
        policy.close()


async def _as_loaded(versions: Collection[int]) -> None:
    """Take the weights of `model.path`, which nobody replaces, for verified."""


async def _until_stopped(policy: VllmPolicy) -> None:
    """Wait for Ctrl-C or SIGTERM. Raises EngineDead."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, partial(stopped.set))
    watching = asyncio.create_task(policy.watch())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait([watching, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if watching.done():
        watching.result()
    watching.cancel()


def _lines(url: str, key: str, chat: bool) -> Iterator[str]:
    """What to type elsewhere, in lines of at most 80 characters."""
    path, body, python = _CHAT if chat else _TEXT
    yield f"export OPENAI_BASE_URL={url}"
    yield f"export OPENAI_API_KEY={key}"
    yield ""
    yield f"curl -s $OPENAI_BASE_URL/{path} \\"
    yield '  -H "Authorization: Bearer $OPENAI_API_KEY" \\'
    yield f"  -d '{{{body}}}'"
    yield ""
    yield "python -c 'import openai"
    yield f"print(openai.OpenAI().{python}'"
    yield ""
    yield "Ctrl-C ends it."
