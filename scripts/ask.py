"""Ask a trained model in the terminal: `scripts/ask.py MODEL|RUN|URL [QUESTION …] [a.b=c …]`.

The model is a run's best checkpoint, any checkpoint or Hugging Face folder, in this process, or
that of an OpenAI-compatible server. Thoughts, searches and passages are shown as they come, then
the answer and what it took. Without a question, questions are read from the terminal, or standard
input, until it ends. Exit codes: 0 answered, 1 failed, 2 bad input, 130 interrupted.
"""

import argparse
import asyncio
import math
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from rich.console import Console

from actors.environment import Retriever
from actors.environments import searches, stops_of
from actors.errors import ActorError, PromptTooLong
from actors.policy import Policy
from actors.prompt import Prompter, load_tokenizer
from actors.retrieval import open_retrieval
from configs import process
from configs.load import ConfigError
from configs.schema import Config
from retrieval_server.protocol import RetrievalError
from scripts import ask_model, preflight
from scripts.ask_endpoint import EndpointPolicy
from scripts.ask_stream import Asker, View, Words
from scripts.ask_view import Lines, Terminal
from scripts.ask_wire import base_url
from scripts.found_model import MODEL, WEIGHTS, configured
from scripts.overrides import fields_of, is_override
from scripts.own_server import ServerFailed, own_address, probe, serving

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
KEY_VARIABLE, MAX_KEY_BYTES = "OPENAI_API_KEY", 4096
PROMPT = "question> "
SERVER_LEAVES_S = 2.0  # somebody waits for the prompt
_MISSPELT = re.compile(r"[A-Za-z_]\w*(\.\w+)+=\S*")  # a section that does not exist
_FAILURES = (ActorError, RetrievalError, ServerFailed)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `questions` and `overrides` apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL|RUN|URL", help="a folder, or an http(s) URL")
    parser.add_argument("words", nargs="*", metavar="QUESTION|a.b=c", help="or fields to override")
    parser.add_argument("--config", metavar="FILE", help="needed where MODEL is not of a run")
    parser.add_argument("--weights", choices=WEIGHTS, default=MODEL, help="ema: their average")
    parser.add_argument("--environment", metavar="NAME", help="environment.name")
    parser.add_argument("--retrieval", metavar="URL", help="a retrieval server that runs")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each question")
    of_urls = parser.add_argument_group("where a URL is asked")
    of_urls.add_argument("--model", dest="name", metavar="NAME", help="of those that it serves")
    of_urls.add_argument("--tokenizer", metavar="FOLDER", help="default: model.path")
    of_urls.add_argument("--key-file", metavar="FILE", help=f"default: {KEY_VARIABLE}")
    given = parser.parse_intermixed_args(words)
    given.overrides = list(filter(_is_override, given.words))
    given.questions = [word for word in given.words if not _is_override(word)]
    given.endpoint = given.model.startswith(("http://", "https://"))
    if not (math.isfinite(given.temperature) and given.temperature >= 0):
        parser.error(f"--temperature {given.temperature!r}: 0 (greedy) or above")
    if not given.endpoint and (given.name or given.tokenizer or given.key_file):
        parser.error("--model, --tokenizer and --key-file are for a URL")
    if given.endpoint and given.weights != MODEL:
        parser.error("--weights is not for a URL: the server has what it was started with")
    return given


def _is_override(word: str) -> bool:
    return is_override(word) or bool(_MISSPELT.fullmatch(word))


def configure(given: argparse.Namespace) -> Config:
    """The configuration to ask with, checked. Raises ConfigError."""
    overrides = list(given.overrides)
    if given.environment:
        overrides.append(f"environment.name={given.environment}")
    if given.retrieval:
        if not given.retrieval.startswith(("http://", "https://")):
            raise ConfigError(f"--retrieval {given.retrieval!r}: give http://HOST:PORT")
        overrides += [f"retrieval.url={given.retrieval}", "retrieval.recorded="]
    if given.endpoint:
        base_url(given.model)
        path, record = given.tokenizer, None
    else:
        if "model.path" in fields_of(overrides):
            raise ConfigError("model.path is what MODEL says: drop the override")
        found = ask_model.find_model(given.model, given.weights)
        path, record = str(found.folder), found.record
    config = configured(given.model, record, given.config, overrides)
    if path:
        model = msgspec.structs.replace(config.model, path=path)
        config = msgspec.structs.replace(config, model=model)
    if given.endpoint:
        ask_model.check_tokenizer(config.model.path)
    if config.retrieval.has_own_server:
        if searches(config) and not (config.retrieval.corpus or config.retrieval.index):
            raise ConfigError(
                "retrieval.corpus and retrieval.url are empty, so nothing can be searched: name "
                "passages, retrieval.corpus=FILE, or a server, --retrieval URL"
            )
        config = own_address(config)
    preflight.check_parts(config, model=not given.endpoint, retrieval=searches(config))
    return config


def read_key(path: str | None) -> str:
    """The server's key: a file's, which its owner alone can read, else the environment's, else ''.
    Raises ConfigError."""
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


def typed(given: argparse.Namespace) -> bool:
    """Whether somebody sits at the terminal and types questions."""
    return not given.questions and not given.json and sys.stdin.isatty()


def questions(given: argparse.Namespace) -> Iterator[str]:
    """What is asked: on the command line, else on standard input, line by line until it ends."""
    lines: Iterable[str] = given.questions or (_prompted() if typed(given) else sys.stdin)
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


async def converse(given: argparse.Namespace, config: Config, notices: Console) -> int:
    """Make everything ready, ask, answer; the exit code. Raises ConfigError and `_FAILURES`; with
    somebody at the terminal, or where the question alone is too long, it is told and the next one
    asked."""
    code = 0
    async with AsyncExitStack() as stack:
        with notices.status("making ready ..."):
            asker = await _ready(given, config, stack)
        for question in questions(given):  # the loop may stand still: nobody else is served by it
            if isinstance(asker.view, Terminal) and not typed(given):
                asker.view.asked(question)
            try:
                await asker.ask(question)
            except _FAILURES as error:
                asker.view.failed(question, error)
                if not typed(given):
                    if not isinstance(error, PromptTooLong):
                        raise
                    code = FAILED
                _tell(error)
    return code


async def _ready(given: argparse.Namespace, config: Config, stack: AsyncExitStack) -> Asker:
    server = None
    if searches(config) and config.retrieval.has_own_server:
        # It starts while the model is loaded.
        server = stack.enter_context(serving(config, leave_s=SERVER_LEAVES_S))
    elif searches(config) and config.retrieval.url:
        await probe(config)
    retriever: Retriever = await stack.enter_async_context(open_retrieval(config))
    try:
        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {config.model.path!r}: {error}") from error
    prompter = Prompter(tokenizer, config.questions, config.actors)
    view: View = Lines(sys.stdout, prompter.decode)
    if not given.json:
        view = Terminal(Console(highlight=False), stops_of(config))
    words = Words(tokenizer, view.said)
    policy = await _policy(given, config, tokenizer, words, view, stack)
    if server:
        await server.ready()
    return Asker(config, policy, retriever, prompter, words, view, given.temperature)


async def _policy(
    given: argparse.Namespace,
    config: Config,
    tokenizer: Any,
    words: Words,
    view: View,
    stack: AsyncExitStack,
) -> Policy:
    if not given.endpoint:
        return ask_model.load_policy(config, tokenizer, lambda _, token: words.put(token))

    def heard(ids: Sequence[int], text: str) -> None:
        for token in ids:
            words.put(token)
        if not ids:
            view.said(text)

    endpoint = EndpointPolicy(
        given.model,
        given.name or "",
        tokenizer,
        heard,
        read_key(given.key_file),
        config.actors.engine_deadline_s,
    )
    return await stack.enter_async_context(endpoint)


def _tell(error: Exception) -> None:
    print(f"ask: {error}", file=sys.stderr)


def main(words: Sequence[str] | None = None) -> int:
    """Check, ask, answer; the exit code."""
    given = parse(words)
    ask_model.prepare_environment()
    try:
        if given.endpoint:
            read_key(given.key_file)
        config = configure(given)
        return asyncio.run(converse(given, config, Console(stderr=True)))
    except ConfigError as error:
        _tell(error)
        return BAD_INPUT
    except _FAILURES as error:
        _tell(error)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the answers has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    # asyncio's own handler would wait for the model to finish its turn.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _interrupt)
    process.leave(main())
