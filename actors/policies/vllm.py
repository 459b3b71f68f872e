"""vLLM's AsyncLLM as a Policy and as weight_sync's ServingEngine: the only importer of vllm here.

Log-probs and versions are the engine's own. The death of its process is EngineDead. vLLM is
imported inside functions: its environment must be set before, and a machine without it must get the
remedy named.
"""

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from actors.errors import EngineDead, EngineUnusable, GenerationFailed
from actors.policies.adapter import adapter_arguments
from actors.policies.base import PROBE, Completion, Delta, Stops
from actors.policies.engine import (
    Scratch,
    check_installation,
    choose_gpus,
    engine_arguments,
    forking,
    prepare_environment,
    stop_arguments,
)
from actors.policies.outputs import completion_of, own_logprobs, token_versions
from actors.policies.statistics import EngineStatistics
from actors.prompt import load_tokenizer
from configs.devices import on_cpu
from configs.runtime.gpus import Gpus
from configs.schema import ActorsConfig, Config
from weight_sync.protocol import (
    ADAPTER_ID,
    ADAPTER_NAME,
    WORKER_EXTENSION,
    Adapter,
    WeightSyncError,
    encode,
    require_done,
)

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

WATCH_EVERY_S = 0.5
KILL_AFTER_S = 5.0
# What vLLM raises of arguments that it cannot take together.
_OF_ARGUMENTS = (AssertionError, AttributeError, ImportError, LookupError, TypeError)
# The sampling arguments that end a completion at these texts.
StopArguments = Callable[[tuple[str, ...]], dict[str, Any]]


class VllmPolicy:
    """One engine for all rollouts of this process; made by `await VllmPolicy.start(config)`."""

    def __init__(
        self,
        engine: "AsyncLLM",
        stop_arguments: StopArguments,
        scratch: Scratch | None = None,
        deadline_s: float = ActorsConfig.engine_deadline_s,
        keep: bool = False,
        statistics: EngineStatistics | None = None,
        gpus: Gpus | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """`keep`: an update leaves the caches of requests in flight as they are. `statistics`: what
        the engine tells of its steps, where it was started to tell. `gpus` are released at the end.
        `adapter`: what the engine was started to compute on its base; every request names it.
        """
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._parameters = SamplingParams
        self._engine: AsyncLLM | None = engine
        self._scratch, self._deadline_s, self._keep = scratch, deadline_s, keep
        self._gpus = gpus or Gpus()
        self._adapter = adapter
        self._named = LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_NAME) if adapter else None
        self.statistics = statistics or EngineStatistics()
        self._version = self._loads = 0
        self._labels = [0]  # every version so far, in order
        self._begun: dict[str, int] = {}  # requests in flight: the version at their begin
        self._numbers = itertools.count()
        self._stop_arguments = stop_arguments
        self._arguments = {
            "logprobs": 0,  # the sampled token's own
            "flat_logprobs": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "skip_clone": True,
        }

    @classmethod
    async def start(
        cls,
        config: Config,
        *,
        worker_extension: str = WORKER_EXTENSION,
        number: int | None = None,
        adapter: Adapter | None = None,
    ) -> Self:
        """Check the installation and start the engine in a child process (tens of seconds, during
        which the event loop stands still), on the GPUs that `choose_gpus` gives for `number`. With
        an `adapter` it computes that on the model of `model.path`: zeros until a version is loaded.
        Raises EngineUnusable.
        """
        check_installation()
        prepare_environment(config)
        path = config.model.path
        further = adapter_arguments(adapter, path) if adapter else {}
        gpus, scratch = choose_gpus(config, number), Scratch(config.run_dir)
        statistics = EngineStatistics()
        try:
            # Not in a thread: the child dies with the thread that started it.
            with scratch.entered(), gpus.visible():
                policy = cls(
                    _start_engine(config, worker_extension, statistics, further),
                    _stopping_with(load_tokenizer(path, config.model.trust_remote_code)),
                    scratch,
                    config.actors.engine_deadline_s,
                    keep=config.weight_sync.in_flight == "keep",
                    statistics=statistics,
                    gpus=gpus,
                    adapter=adapter,
                )
        except (RuntimeError, ValueError, OSError, *_OF_ARGUMENTS) as error:
            scratch.remove()
            gpus.release()
            raise _unusable(config, error) from error
        policy._listen()
        await policy._require_as_asked()
        return policy

    @property
    def engine(self) -> "AsyncLLM":
        """The engine. Raises EngineDead after `close`."""
        if self._engine is None:
            raise EngineDead("the engine is closed")
        return self._engine

    async def complete(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_tokens: int,
        stops: Stops,
        priority: int = 0,
    ) -> Completion:
        """Complete exactly `tokens`, keeping the stop. Raises PolicyError."""
        arguments = self._stop_arguments(stops) | self._arguments
        parameters = self._parameters(
            temperature=temperature, seed=seed, max_tokens=max_tokens, **arguments
        )
        output = await self._generate(tokens, parameters, priority)
        sampled = output.outputs[0]
        ids = np.asarray(sampled.token_ids, dtype=np.int32)
        return completion_of(output, ids, own_logprobs(sampled.logprobs, ids))

    async def stream(
        self,
        tokens: Sequence[int],
        *,
        temperature: float,
        seed: int,
        max_tokens: int,
        stops: Stops,
        priority: int = 0,
    ) -> AsyncGenerator[Delta, None]:
        """Complete, telling tokens as they come. Until the last, vLLM does not tell which weights
        sampled a token: any that has served since its request began. Raises PolicyError.
        """
        from vllm.sampling_params import RequestOutputKind

        arguments = self._stop_arguments(stops) | self._arguments
        parameters = self._parameters(
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            **arguments | {"output_kind": RequestOutputKind.DELTA},
        )
        ids: list[NDArray[np.int32]] = []
        scores: list[NDArray[np.float32]] = []
        done, begun = None, len(self._labels) - 1
        async with contextlib.aclosing(self._outputs(tokens, parameters, priority)) as outputs:
            async for output in outputs:
                sampled = output.outputs[0]
                ids.append(np.asarray(sampled.token_ids, dtype=np.int32))
                scores.append(own_logprobs(sampled.logprobs, ids[-1]))
                if output.finished:
                    done = completion_of(output, np.concatenate(ids), np.concatenate(scores))
                yield Delta(ids[-1], scores[-1], frozenset(self._labels[begun:]), done)
        if done is None:
            raise GenerationFailed("the engine ended a completion without an end")

    async def score(self, tokens: Sequence[int]) -> tuple[NDArray[np.float32], int]:
        """Return float32[n - 1]: log-probs of tokens[1:] at temperature 1, computed anew, not from
        the prefix cache (vLLM skips it for prompt log-probs); and the version that scored them.
        """
        parameters = self._parameters(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            skip_reading_prefix_cache=True,
            flat_logprobs=True,
            output_kind=self._arguments["output_kind"],
        )
        output = await self._generate(tokens, parameters, PROBE)
        given = np.asarray(tokens[1:], dtype=np.int32)
        version = int(token_versions(output.outputs[0].weight_versions, 1)[0])
        return own_logprobs(output.prompt_logprobs, given, skip=1), version

    async def pause(self) -> None:
        """Freeze requests where they are; drop keys and values, unless they are to be kept."""
        # AsyncLLM.pause_generation sleeps 20 ms on top of this, for callers that need no answer.
        with _naming_death():
            await self.engine.engine_core.pause_scheduler_async(
                mode="keep", clear_cache=not self._keep
            )

    async def resume(self) -> None:
        """Run frozen and queued requests."""
        if not self._keep:
            self.statistics.updated()
        with _naming_death():
            await self.engine.resume_generation()

    async def call_workers(self, method: str, *args: bytes | int | str | float) -> list[Any]:
        """Call a method of the worker extension; one result per worker."""
        with _naming_death():
            results: list[Any] = await self.engine.collective_rpc(method, args=args)
        return results

    async def set_policy_version(self, version: int) -> None:
        """Label every token sampled from here on."""
        with _naming_death():
            await self.engine.update_weight_version(str(version))
        self._version = version
        self._labels.append(version)
        self._loads += 1  # a version may be loaded again, because it had not verified

    def gauges(self) -> dict[str, float]:
        """Return the engine's statistics, and by how many versions the oldest keys and values in
        use lie behind the weights.
        """
        oldest = min(self._begun.values(), default=self._version) if self._keep else self._version
        behind = float(self._version - oldest)
        return self.statistics.gauges() | {"actor/oldest_kv_versions": behind}

    async def watch(self) -> NoReturn:
        """Return never; raise EngineDead when the engine's process is gone, or has not answered a
        question between two of its steps for `actors.engine_deadline_s`.
        """
        silent_s = 0.0
        answer: asyncio.Future[None] | None = None
        try:
            while not self.engine.errored:
                if answer is None or answer.done():
                    silent_s, answer = 0.0, asyncio.ensure_future(self._ask())
                if silent_s >= self._deadline_s:
                    raise EngineDead(
                        f"the engine has not answered for {self._deadline_s:g} s "
                        "(actors.engine_deadline_s)"
                    )
                # Counted in looks, not in time: if this process was stopped, so was its patience.
                await asyncio.sleep(WATCH_EVERY_S)
                silent_s += WATCH_EVERY_S
        finally:
            if answer is not None:
                answer.cancel()
        raise EngineDead("the engine's process is gone")

    def close(self) -> None:
        """End the engine's process, by force after `KILL_AFTER_S`; at once if it has failed, and on
        a CPU, where one without workers of its own leaves nothing behind.
        """
        engine, self._engine = self._engine, None
        if engine is not None:
            logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns of every kill
            alone = on_cpu() and engine.vllm_config.parallel_config.world_size == 1
            engine.shutdown(timeout=0.0 if alone or engine.errored else KILL_AFTER_S)
            del engine
            gc.collect()
        if self._scratch is not None:
            self._scratch.remove()
        self._gpus.release()

    def _listen(self) -> None:
        """Have the statistics go to ours alone: vLLM counts them for Prometheus too, token by
        token, which nobody reads here.
        """
        manager, cache = self.engine.logger_manager, self.engine.vllm_config.cache_config
        del manager.stat_loggers[1:]
        self.statistics.kv_tokens = cache.num_gpu_blocks * cache.block_size

    async def _require_as_asked(self) -> None:
        """Close, and raise EngineUnusable, where a worker's model is not computed as asked."""
        try:
            if self._adapter is not None:
                adapt = encode(self._adapter)
                require_done(await self.call_workers("weight_sync_adapt", adapt))
            require_done(await self.call_workers("weight_sync_device"))
        except (WeightSyncError, EngineDead) as error:
            self.close()
            raise EngineUnusable(str(error)) from error

    async def _ask(self) -> None:
        """Ask the engine anything; `errored` tells of its death."""
        with contextlib.suppress(EngineDead), _naming_death():
            await self.engine.engine_core.is_sleeping_async()

    async def _generate(self, tokens: Sequence[int], parameters: Any, priority: int) -> Any:
        outputs = [part async for part in self._outputs(tokens, parameters, priority)]
        if not outputs:
            raise GenerationFailed("the engine ended a completion without output")
        return outputs[-1]

    async def _outputs(
        self, tokens: Sequence[int], parameters: Any, priority: int
    ) -> AsyncGenerator[Any, None]:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineGenerateError

        # A prompt already of type "token" skips the thread that would tokenise it.
        prompt = {"type": "token", "prompt_token_ids": list(tokens)}
        number = str(next(self._numbers))
        if self._keep:  # no request that begins later may read what older weights have cached
            prompt["cache_salt"] = str(self._loads)
        self._begun[number] = self._version
        try:
            with _naming_death():
                answer = self.engine.generate(
                    prompt, parameters, number, lora_request=self._named, priority=priority
                )
                async with contextlib.aclosing(answer):  # given up, the engine hears of it at once
                    async for part in answer:
                        yield part
        except (EngineGenerateError, VLLMClientError, ValueError) as error:
            cause = error.__cause__ or error  # an EngineGenerateError has no words of its own
            raise GenerationFailed(f"{type(cause).__name__}: {cause}") from error
        finally:
            del self._begun[number]


def _unusable(config: Config, error: Exception) -> EngineUnusable:
    more = config.actors.engine
    beside = f" with actors.engine = {more!r}" if more else ""
    cause = str(error) or type(error).__name__
    return EngineUnusable(
        f"vLLM could not load model.path = {config.model.path!r}{beside}: {cause}"
    )


def _stopping_with(tokenizer: Any) -> StopArguments:
    return functools.lru_cache(functools.partial(stop_arguments, tokenizer))


@contextlib.contextmanager
def _naming_death() -> Iterator[None]:
    """Raise EngineDead in place of vLLM's error."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDead("the engine's process is gone") from error


def _start_engine(
    config: Config,
    worker_extension: str,
    statistics: EngineStatistics,
    further: dict[str, Any],
) -> "AsyncLLM":
    # vLLM keeps tracebacks of optional imports, and with them our frames: no local may hold the
    # engine, or it is never collected and its finaliser complains when the interpreter ends.
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(**engine_arguments(config, worker_extension), **further)
    resolved = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    with forking(config.actors.threads):
        return AsyncLLM.from_vllm_config(
            resolved,
            stat_loggers=[lambda config, index: statistics],
            disable_log_stats=arguments.disable_log_stats,
        )
