"""vLLM's tool parsers as formats of calls. vllm is imported inside functions: a machine without it
gets the remedy named, and the other formats need none.

A parser tells only calls that it could read. That a turn began one is seen by the tag that the
chat template writes before calls (`call_mark` in `actors/environments/chat.py`).
"""

import json
import logging
from typing import Any

from actors.environments.chat import OWN, Call
from actors.environments.search_r1 import Malformed
from actors.prompt import Schemas
from configs.load import ConfigError


class VllmFormat:
    """One of vLLM's parsers with a model's tokenizer and these tools. Raises ConfigError where
    there is no such parser, or none for this tokenizer.
    """

    def __init__(self, name: str, tokenizer: Any, tools: Schemas) -> None:
        field = f"environment.tool_format = {name!r}"
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.tokenizers.hf import get_cached_tokenizer
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ConfigError(
                f"{field}: its parser is vLLM's, which cannot be imported here ({error}): install "
                f"it, or choose one of auto, {', '.join(OWN)}"
            ) from error
        known = ToolParserManager.list_registered()
        if name not in known:
            raise ConfigError(f"{field}: choose one of auto, {', '.join([*OWN, *known])}")
        message = {"role": "user", "content": ""}
        self._request = ChatCompletionRequest(messages=[message], model="", tools=list(tools))
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # a policy's faults
        self._tokenizer = get_cached_tokenizer(tokenizer)
        self._parser = ToolParserManager.get_tool_parser(name)
        try:
            self._made()
        except Exception as error:  # a parser raises whatever it likes of a foreign tokenizer
            raise ConfigError(
                f"{field}: its parser cannot be used with the tokenizer of this model: {error}"
            ) from error

    def calls(self, text: str) -> list[Call | Malformed]:
        """Parse the calls of a turn's own text, in order."""
        return self.read(text)[1]

    def read(self, text: str) -> tuple[str, list[Call | Malformed]]:
        """Parse a turn's own text: what is said beside its calls, and these, in order."""
        try:
            found = self._made().extract_tool_calls(text, self._request)
        except Exception:  # noqa: BLE001 - of a text that its parser did not foresee
            return text, [Malformed()]
        if not found.tools_called:
            return text, []
        made = (each.function for each in found.tool_calls)
        return found.content or "", [_call(each.name, each.arguments) for each in made]

    def _made(self) -> Any:
        return self._parser(self._tokenizer, self._request.tools)  # it keeps what it has read


def _call(name: str, arguments: str) -> Call | Malformed:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return Malformed()
    return Call(name, given) if isinstance(given, dict) else Malformed()
