"""A model behind the gateway by hand: what a program's calls meet in training, without a run.

One engine serves `model.path` as it is. A key is printed, with lines that use it; a call's own
temperature and seed hold, and nothing is recorded.
"""

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from actors.environments.base import Retriever
from actors.environments.registry import searches
from actors.gateway.rolling import nothing_to_verify
from actors.gateway.searches import SessionSearches
from actors.gateway.server import Gateway
from actors.policies.engine import check_installation, prepare_environment
from actors.policies.vllm import VllmPolicy
from actors.prompt import Prompter
from actors.retrieval import open_retrieval
from configs.load import ConfigError, load
from configs.runtime.process import loop_factory
from configs.runtime.signals import Interrupt
from configs.schema import Config
from replay.protocol import Lease
from replay.trajectory import Question, Sampling
from scripts.ask.ask import retrieval_server, searchable, tokenizer_of
from scripts.command.options import Options, argument, option, overrides
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
    """Check, start the engine, serve until Ctrl-C. Raises ConfigError, ActorError, RetrievalError,
    ServerFailed.
    """
    with Interrupt():
        check_installation()
        config = load(options.config, options.overrides)
        wanted = ("model.path", *["retrieval.encoder"] * _has_passages(config))
        config = with_hub_paths(config, wanted)
        if _has_passages(config):
            config = searchable(config)
        preflight.check_parts(
            config, model=True, retrieval=_has_passages(config), environment=False
        )
        config = fitted_alone(config)
        prepare_environment(config)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(config, options.port))


def _has_passages(config: Config) -> bool:
    """True where there is something to search."""
    asked = config.retrieval
    named = asked.url or asked.recorded or asked.corpus or asked.index or asked.is_live
    return bool(named) and searches(config)


async def _serve(config: Config, port: int) -> None:
    prompter = Prompter(tokenizer_of(config), config.questions, config.actors)
    async with AsyncExitStack() as stack:
        found = await _searches(config, prompter, stack) if _has_passages(config) else None
        print(f"starting an engine with {config.model.path}", file=sys.stderr, flush=True)
        policy = await VllmPolicy.start(config)
        stack.callback(policy.close)
        await policy.set_policy_version(0)
        gateway = await Gateway.start(policy, prompter, config, nothing_to_verify, port)
        stack.push_async_callback(gateway.close)
        sampling = Sampling(config.actors.temperature, config.seed)
        session = gateway.open(Lease(0, 0, "train", _BY_HAND, sampling), free=True)
        session.searches = found
        lines = _lines(gateway.url, session.key, prompter.has_chat_template, found is not None)
        print("\n".join(lines), flush=True)
        await _until_stopped(policy)


async def _searches(config: Config, prompter: Prompter, stack: AsyncExitStack) -> SessionSearches:
    """What answers `/v1/retrieve`, once it is ready. Raises RetrievalError, ServerFailed."""
    if server := await retrieval_server(config, stack):
        print("starting a retrieval server", file=sys.stderr, flush=True)
        await server.ready()
    retriever: Retriever = await stack.enter_async_context(open_retrieval(config))
    special = prompter.special_texts
    return SessionSearches(retriever, config.retrieval.top_k, special=special, free=True)


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


def _lines(url: str, key: str, chat: bool, retrieval: bool) -> Iterator[str]:
    """What to type elsewhere, in lines of at most 80 characters."""
    path, body, python = _CHAT if chat else _TEXT
    yield f"export OPENAI_BASE_URL={url}"
    yield f"export OPENAI_API_KEY={key}"
    if retrieval:
        yield f"export FORAGE_RETRIEVAL_URL={url}/retrieve"
    yield ""
    yield f"curl -s $OPENAI_BASE_URL/{path} \\"
    yield '  -H "Authorization: Bearer $OPENAI_API_KEY" \\'
    yield f"  -d '{{{body}}}'"
    yield ""
    yield "python -c 'import openai"
    yield f"print(openai.OpenAI().{python}'"
    yield ""
    yield "Ctrl-C ends it."
