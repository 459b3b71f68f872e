"""vLLM's AsyncLLM with the sizes of an actor's engine, and nothing of ours around it."""

import gc
import itertools
import logging
from collections.abc import Sequence
from typing import Any

from actors.policies.engine import engine_arguments
from configs.schema import Config
from weight_sync.protocol import WORKER_EXTENSION

OURS = ("scheduling_policy", "watermark")  # arguments that vLLM has other defaults for
CLOSE_S = 5.0


class BareEngine:
    """An engine in a child process. Needs the environment that an actor's has."""

    def __init__(self, config: Config) -> None:
        arguments = engine_arguments(config, WORKER_EXTENSION)
        self.engine: Any = _start({n: v for n, v in arguments.items() if n not in OURS})
        self._numbers = itertools.count()

    async def sample(self, prompt: Sequence[int], tokens: int) -> None:
        """Sample so many tokens, with their log-probs, as an actor asks for them."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        number = next(self._numbers)
        parameters = SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        given = {"type": "token", "prompt_token_ids": list(prompt)}
        async for _ in self.engine.generate(given, parameters, str(number)):
            pass

    async def forget(self) -> None:
        """Drop all cached prefixes."""
        await self.engine.reset_prefix_cache()

    def close(self) -> None:
        """End the engine's process."""
        engine, self.engine = self.engine, None
        logging.getLogger("vllm").setLevel(logging.ERROR)
        engine.shutdown(timeout=CLOSE_S)
        del engine
        gc.collect()


def _start(arguments: dict[str, Any]) -> Any:
    # No local may hold the engine: see actors/policies/vllm.py.
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
