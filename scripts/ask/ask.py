"""A question to a trained model, in the terminal.

The model is a run's best checkpoint, any checkpoint or Hugging Face folder, loaded in this process,
or the one behind an OpenAI-compatible server's URL. Without a question, questions are read from the
terminal, or standard input, until it ends.
"""

import asyncio
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from rich.console import Console

from actors.environments.base import Retriever
from actors.environments.registry import require_turns, searches, stops_of
from actors.errors import ActorError, PromptTooLong
from actors.policies.base import Policy
from actors.prompt import Prompter, load_tokenizer
from actors.retrieval import open_retrieval
from configs.load import ConfigError
from configs.runtime.amx import use_amx_where_it_works
from configs.runtime.gpus import GpusTaken, take, visible
from configs.runtime.process import Exit
from configs.runtime.signals import Interrupt
from configs.schema import Config
from configs.trust import ASKING, TRUSTING
from retrieval_server.protocol import RetrievalError
from scripts.ask.endpoint import EndpointPolicy, base_url
from scripts.ask.stream import Asker, StreamDecoder, View
from scripts.ask.view import Lines, Terminal
from scripts.command.options import argument, option
from scripts.command.terminal import complain, status
from scripts.setup import hub, preflight
from scripts.setup.model_checks import TOKENIZER_FILES, has_tokenizer
from scripts.setup.model_source import MODEL, Found, configured, find
from scripts.setup.overrides import QuestionsOrOverrides, fields_of
from scripts.setup.retrieval import OwnServer, ServerFailed, own_address, probe, serving

if TYPE_CHECKING:  # it imports torch
    from actors.policies.transformers import Heard, TransformersPolicy

KEY_VARIABLE, MAX_KEY_BYTES = "OPENAI_API_KEY", 4096
PROMPT = "question> "
SERVER_LEAVES_S = 2.0  # somebody waits for the prompt
_FAILURES = (ActorError, RetrievalError, ServerFailed)


@dataclass(frozen=True)
class AskOptions(QuestionsOrOverrides):
    """Options of `forage ask`. Raises ConfigError for options that contradict each other."""

    target: str = argument("a folder, or an http(s) URL", metavar="MODEL|RUN|URL")
    words: tuple[str, ...] = argument(
        "questions, or fields to override", default=(), metavar="QUESTION|a.b=c"
    )
    config: str | None = option("needed where MODEL is not of a run", metavar="FILE")
    trust: bool = option(TRUSTING, default=False)
    weights: Literal["model", "ema"] = option("ema: their average", default="model")
    environment: str | None = option("environment.name", metavar="NAME")
    retrieval: str | None = option("a retrieval server that runs", metavar="URL")
    temperature: float = option("default 0: greedy", default=0.0)
    json: bool = option("a line of JSON for each question", default=False)
    model: str | None = option("of a URL: one that it serves", metavar="NAME")
    tokenizer: str | None = option("of a URL; default: model.path", metavar="FOLDER")
    key_file: str | None = option(f"of a URL; default: {KEY_VARIABLE}", metavar="FILE")

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"--temperature {self.temperature!r}: 0 (greedy) or above")
        if not self.is_url and (self.model or self.tokenizer or self.key_file):
            raise ConfigError("--model, --tokenizer and --key-file are for a URL")
        if self.is_url and self.weights != MODEL:
            raise ConfigError("--weights is not for a URL: the server has what it was started with")

    @property
    def is_url(self) -> bool:
        """True where a server is asked."""
        return self.target.startswith(("http://", "https://"))

    @property
    def is_typed(self) -> bool:
        """True where somebody at the terminal types the questions."""
        return not self.questions and not self.json and sys.stdin.isatty()


def ask(options: AskOptions) -> int:
    """Check, ask, answer. Raises ConfigError, ActorError, RetrievalError, ServerFailed."""
    prepare_environment()
    with Interrupt():  # at once: asyncio's own handler would wait for the model's turn to end
        if options.is_url:
            read_key(options.key_file)
        config = configure(options)
        try:
            return asyncio.run(converse(options, config))
        except BrokenPipeError:  # whoever read the answers has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Exit.FAILED


def configure(options: AskOptions) -> Config:
    """The configuration to ask with, checked. Raises ConfigError."""
    overrides = options.overrides
    if options.environment:
        overrides.append(f"environment.name={options.environment}")
    if options.retrieval:
        if not options.retrieval.startswith(("http://", "https://")):
            raise ConfigError(f"--retrieval {options.retrieval!r}: give http://HOST:PORT")
        overrides += [f"retrieval.url={options.retrieval}", "retrieval.recorded="]
    if options.is_url:
        base_url(options.target)
        path, record = options.tokenizer, None
    else:
        if "model.path" in fields_of(overrides):
            raise ConfigError("model.path is what MODEL says: drop the override")
        found = find_model(options.target, options.weights)
        path, record = str(found.folder), found.record
    config = configured(
        options.target, record, options.config, overrides, trusted=options.trust, reads=ASKING
    )
    if path:
        model = msgspec.structs.replace(config.model, path=path)
        config = msgspec.structs.replace(config, model=model)
    config = hub.with_hub_paths(config, ("model.path", "retrieval.encoder"))
    if options.is_url:
        check_tokenizer(config.model.path)
    require_turns(config)
    config = searchable(config)
    preflight.check_parts(config, model=not options.is_url, retrieval=searches(config))
    return config


def searchable(config: Config) -> Config:
    """The configuration with the address of a server of its own, where it has one. Raises
    ConfigError where it searches and has nothing to search.
    """
    if not config.retrieval.has_own_server:
        return config
    asked = config.retrieval
    if searches(config) and not (asked.corpus or asked.index or asked.is_live):
        raise ConfigError(
            "retrieval.corpus and retrieval.url are empty, so nothing can be searched: name "
            "passages, retrieval.corpus=FILE, or a server, retrieval.url=URL"
        )
    return own_address(config)


def read_key(path: str | None) -> str:
    """The server's key: of a file only its owner can read, else of the environment, else ''."""
    if not path:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        mode = Path(path).stat().st_mode & 0o777
        with Path(path).open("rb") as file:
            key = file.read(MAX_KEY_BYTES + 1).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--key-file {path!r}: {error}: name a file that holds the key"
        ) from error
    if mode & 0o077:
        raise ConfigError(f"--key-file {path!r}: mode {mode:04o} lets others read it: chmod 600")
    if not key or len(key) > MAX_KEY_BYTES or not key.isprintable():
        raise ConfigError(f"--key-file {path!r}: it must hold the key, on one line, and no more")
    return key


def questions(options: AskOptions) -> Iterator[str]:
    """The questions of the command line, else of standard input, line by line until it ends."""
    lines: Iterable[str] = options.questions or (_prompted() if options.is_typed else sys.stdin)
    return filter(None, map(str.strip, lines))


def _prompted() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines with it
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return


async def converse(options: AskOptions, config: Config) -> int:
    """Prepare, ask, answer; the exit code. Raises ConfigError, and `_FAILURES` unless typed."""
    code = Exit.DONE
    async with AsyncExitStack() as stack:
        with status("making ready"):
            asker = await _ready(options, config, stack)
        for question in questions(options):  # the loop may stand still: nobody else is served by it
            if isinstance(asker.view, Terminal) and not options.is_typed:
                asker.view.asked(question)
            try:
                await asker.ask(question)
            except _FAILURES as error:
                asker.view.failed(question, error)
                if not options.is_typed:
                    if not isinstance(error, PromptTooLong):
                        raise
                    code = Exit.FAILED
                complain(str(error))
    return code


async def _ready(options: AskOptions, config: Config, stack: AsyncExitStack) -> Asker:
    server = await retrieval_server(config, stack)
    retriever: Retriever = await stack.enter_async_context(open_retrieval(config))
    tokenizer = tokenizer_of(config)
    prompter = Prompter(tokenizer, config.questions, config.actors)
    view: View = Lines(sys.stdout, prompter.decode)
    if not options.json:
        view = Terminal(Console(highlight=False), stops_of(config))
    words = StreamDecoder(tokenizer, view.said)
    policy = await _policy(options, config, tokenizer, words, stack)
    if server:
        await server.ready()
    return Asker(config, policy, retriever, prompter, words, view, options.temperature)


async def retrieval_server(config: Config, stack: AsyncExitStack) -> OwnServer | None:
    """The server of its own that the configuration asks for, still starting while the model is
    loaded; another one is probed. Raises ServerFailed.
    """
    if searches(config) and config.retrieval.has_own_server:
        return stack.enter_context(serving(config, leave_s=SERVER_LEAVES_S))
    if searches(config) and config.retrieval.url:
        await probe(config)
    return None


def tokenizer_of(config: Config) -> Any:
    """The tokenizer of `model.path`. Raises ConfigError."""
    try:
        return load_tokenizer(config.model.path, config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {config.model.path!r}: {error}") from error


async def _policy(
    options: AskOptions,
    config: Config,
    tokenizer: Any,
    words: StreamDecoder,
    stack: AsyncExitStack,
) -> Policy:
    if not options.is_url:
        return load_policy(config, tokenizer, lambda _, token: words.put(token))

    def heard(ids: Sequence[int]) -> None:
        for token in ids:
            words.put(token)

    endpoint = EndpointPolicy(
        options.target,
        options.model or "",
        tokenizer,
        heard,
        read_key(options.key_file),
        config.actors.engine_deadline_s,
    )
    return await stack.enter_async_context(endpoint)


def find_model(given: str, weights: str = MODEL) -> Found:
    """Find the model that MODEL and `--weights` name. Raises ConfigError."""
    if re.fullmatch(r"[\w.-]+:\d+(/\S*)?", given):
        raise ConfigError(f"MODEL = {given!r}: no URL, no folder: did you mean http://{given}?")
    if not Path(hub.model("MODEL", given)).is_dir():
        raise ConfigError(
            f"{given!r}: no such folder: name a run, a checkpoint, a Hugging Face folder, a model "
            "on the Hub or the URL of a server"
        )
    return find(given, weights)


def check_tokenizer(folder: str) -> None:
    """Raise ConfigError unless there is a tokenizer in `folder`."""
    if not folder:
        raise ConfigError(
            "a server is asked in tokens, and no tokenizer is named: give the folder of the served "
            "model's, --tokenizer FOLDER"
        )
    if not has_tokenizer(Path(folder)):
        raise ConfigError(
            f"no tokenizer ({' or '.join(TOKENIZER_FILES)}) in {folder!r}: name the "
            "folder of the served model's, --tokenizer FOLDER"
        )


def prepare_environment() -> None:
    """Set the variables that torch and transformers read on import; those already set win."""
    use_amx_where_it_works()
    settings = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait by spinning stall busy machines
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def load_policy(config: Config, tokenizer: Any, heard: "Heard") -> "TransformersPolicy":
    """Load `model.path`; `heard` is called with every sampled token. Raises ConfigError."""
    import torch  # here and below: seconds, that bad input need not wait for
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from actors.policies.transformers import TransformersPolicy, multiply_head

    logging.disable_progress_bar()
    path, device = config.model.path, _free_device()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, config.engine_dtype),
            attn_implementation="sdpa",
            trust_remote_code=config.model.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
        )
        model.to(device)
        model = multiply_head(model, config.model.head_dtype)
        return TransformersPolicy(model, tokenizer, heard=heard)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:  # the last: out of memory
        raise ConfigError(f"model.path = {path!r} cannot be loaded: {error}") from error


def _free_device() -> str:
    """A GPU of this host that is free, for as long as this process lives, or the CPU where there is
    none. Raises ConfigError where all are taken.
    """
    gpus = visible()
    try:
        taken = take(1, gpus)
    except GpusTaken as error:
        raise ConfigError(str(error)) from error
    return f"cuda:{list(gpus).index(taken.names[0])}" if taken.names else "cpu"
