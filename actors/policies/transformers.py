"""A transformers model as a Policy, in this process: for benchmarks and debugging.

Requests with the same stops, made in the same turn of the event loop, are generated as one batch,
during which the loop stands still. A completion depends on its own tokens, temperature and seed;
the rest of its batch changes rounding, no more.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from actors.errors import GenerationFailed
from actors.policies.base import Completion, Stops
from actors.policies.engine import stop_arguments
from actors.policies.kv_cache import Block, KeysValues, PrefixCache

Heard = Callable[[int, int], None]  # the request's place in its batch, and its next token
_COMPACT_BELOW = 0.75  # finished rows leave the batch when this share of it is still at work


@dataclass(frozen=True, eq=False)
class _Request:
    tokens: Sequence[int]
    temperature: float
    seed: int
    max_tokens: int
    done: "asyncio.Future[Completion]"


class TransformersPolicy:
    """A causal language model of transformers that samples; `version` labels its tokens."""

    def __init__(
        self, model: Any, tokenizer: Any, version: int = 0, heard: Heard | None = None
    ) -> None:
        """`heard` is told every token when it is sampled, while the event loop stands still.

        Raises ValueError for a model whose attention would add a boolean mask, not apply it.
        """
        attention = getattr(model.config, "_attn_implementation", "sdpa")
        if attention != "sdpa":
            raise ValueError(
                f"attention {attention!r}: load the model with attn_implementation='sdpa'"
            )
        self.model, self.version = model.eval(), version
        self._tokenizer, self._heard = tokenizer, heard
        self._stops = lru_cache(partial(_stops_of, model, tokenizer))
        self._waiting: dict[tuple[str, ...], list[_Request]] = {}  # by their stops
        self._prefixes = PrefixCache()

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take other weights, by Hugging Face name (tied ones once), and their label.

        Raises KeyError when one is missing.
        """
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(weights[name])
        self.version, self._prefixes = version, PrefixCache()

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
        """Complete exactly `tokens`, keeping the stop. Raises GenerationFailed."""
        loop = asyncio.get_running_loop()
        request = _Request(tokens, temperature, seed, max_tokens, loop.create_future())
        waiting = self._waiting.setdefault(stops, [])
        if not waiting:
            loop.call_soon(self._generate, stops)  # after everybody who is ready now has asked
        waiting.append(request)
        return await request.done

    def _generate(self, stops: tuple[str, ...]) -> None:
        requests = self._waiting.pop(stops)
        try:
            with torch.inference_mode():
                completions = self._batch(requests, stops)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return _fail(requests, GenerationFailed(f"the model failed: {error}"))
        except Exception as error:
            _fail(requests, error)  # else those who wait would wait for ever
            raise
        for request, completion in zip(requests, completions, strict=True):
            if not request.done.done():  # cancelled meanwhile
                request.done.set_result(completion)

    def _batch(self, requests: Sequence[_Request], stops: tuple[str, ...]) -> list[Completion]:
        rows = _Rows.begin(requests, self._prefixes, self.model.device)
        sampled = _Sampled(len(requests), rows.most)
        end_ids, end_texts = self._stops(stops)
        blocks: list[Block] = []
        logits = rows.prefill(self.model)
        first, first_token_at = rows.cache.used, 0.0
        for step in range(rows.most):
            chosen, scores = rows.sample(logits, step)
            sampled.put(rows.who, rows.active, step, chosen, scores)
            first_token_at = first_token_at or time.time()
            if self._heard:
                for who, token in zip(*rows.at_work(chosen), strict=True):
                    self._heard(who, token)
            so_far = sampled.tokens[rows.who, : step + 1]
            ended = self._ended(chosen, so_far, end_ids, end_texts)
            sampled.stopped[rows.who] |= ended & rows.active
            rows.active &= ~ended & (rows.budget > step + 1)
            if not rows.active.any():
                break
            chosen = rows.compact(chosen, blocks)
            logits = rows.decode(self.model, chosen)
        blocks.append(
            rows.cache.block(torch.arange(len(rows.who), device=rows.cache.seen.device), rows.who)
        )
        completions = [self._completion(*row, first_token_at) for row in sampled.rows()]
        # Of the last batch alone: its rollouts' next turns come next.
        self._prefixes = PrefixCache()
        for block in blocks:
            who = block.who.tolist()
            texts = [[*requests[i].tokens, *completions[i].tokens[:-1].tolist()] for i in who]
            ends = first + sampled.lengths[block.who] - 1
            self._prefixes.remember(block, texts, ends.to(block.seen.device))
        return completions

    def _ended(self, chosen: Tensor, so_far: Tensor, ids: Tensor, stops: list[str]) -> Tensor:
        ended = torch.isin(chosen, ids).cpu()
        if stops:
            texts = self._tokenizer.batch_decode(
                so_far.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            said = [any(stop in text for stop in stops) for text in texts]
            ended |= torch.tensor(said)
        return ended

    def _completion(
        self,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        length: int,
        stopped: bool,
        first_token_at: float,
    ) -> Completion:
        return Completion(
            tokens=tokens[:length].astype(np.int32),
            logprobs=logprobs[:length].copy(),
            versions=np.full(length, self.version, np.int32),
            finish_reason="stop" if stopped else "length",
            first_token_at=first_token_at,
        )


def multiply_head(model: Any, dtype: str) -> Any:
    """Have the model's output layer multiply in `dtype` (`model.head_dtype`; empty: in its own);
    return the model.
    """
    if dtype:
        head, wider = model.get_output_embeddings(), getattr(torch, dtype)

        def forward(hidden: Tensor) -> Tensor:
            bias = None if head.bias is None else head.bias.to(wider)
            return functional.linear(hidden.to(wider), head.weight.to(wider), bias)

        head.forward = forward
    return model


def _stops_of(model: Any, tokenizer: Any, texts: tuple[str, ...]) -> tuple[Tensor, list[str]]:
    """Return the ids that end a completion, and the texts that do."""
    arguments = stop_arguments(tokenizer, texts)
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = list(ends) if isinstance(ends, (list, tuple)) else [ends]
    ends += [tokenizer.eos_token_id, *arguments.get("stop_token_ids", [])]
    ids = sorted({each for each in ends if each is not None})
    return torch.tensor(ids, device=model.device), arguments.get("stop", [])


def _fail(requests: Sequence[_Request], error: Exception) -> None:
    for request in requests:
        if not request.done.done():
            request.done.set_exception(error)


class _Sampled:
    """The tokens sampled so far, by request."""

    def __init__(self, count: int, most: int) -> None:
        self.tokens = torch.zeros(count, most, dtype=torch.int64)
        self.logprobs = torch.zeros(count, most)
        self.lengths = torch.zeros(count, dtype=torch.int64)
        self.stopped = torch.zeros(count, dtype=torch.bool)

    def put(self, who: Tensor, active: Tensor, step: int, chosen: Tensor, scores: Tensor) -> None:
        """Record one token for each active row."""
        who = who[active]
        self.tokens[who, step] = chosen.cpu()[active]
        self.logprobs[who, step] = scores.cpu()[active]
        self.lengths[who] = step + 1

    def rows(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], int, bool]]:
        """Yield tokens, log-probs, their valid length, and True where a stop ended them."""
        return zip(
            self.tokens.numpy(),
            self.logprobs.numpy(),
            self.lengths.tolist(),
            self.stopped.tolist(),
            strict=True,
        )


@dataclass(eq=False)
class _Rows:
    """The batch at work: B rows that all write the same column.

    who int64[B]: each row's request; active bool[B]; tokens int64[B, T], the new ones of each
    prompt, padded on the left; draws float64[B, most] in [0, 1).
    """

    who: Tensor
    active: Tensor
    budget: Tensor
    tokens: Tensor
    padding: Tensor
    positions: Tensor  # of the next token
    temperatures: Tensor
    draws: Tensor
    cache: KeysValues
    most: int

    @classmethod
    def begin(cls, requests: Sequence[_Request], prefixes: PrefixCache, device: Any) -> "_Rows":
        """Lay the requests out, with the kept columns of their prompts."""
        known, found = zip(*(prefixes.find(r.tokens) for r in requests), strict=True)
        new = [len(r.tokens) - start for r, start in zip(requests, known, strict=True)]
        count, longest, most = len(requests), max(new), max(r.max_tokens for r in requests)
        old = max((place[0].seen.shape[1] for place in found if place is not None), default=0)
        tokens, draws = np.zeros((count, longest), np.int64), np.zeros((count, most))
        for row, request in enumerate(requests):
            tokens[row, longest - new[row] :] = request.tokens[known[row] :]
            if request.temperature:
                rng = np.random.default_rng(request.seed)
                draws[row, : request.max_tokens] = rng.random(request.max_tokens)
        padding = longest - torch.tensor(new, device=device)
        seen = torch.zeros(count, old + longest + most, dtype=torch.bool, device=device)
        seen[:, old:] = torch.arange(longest + most, device=device) >= padding[:, None]
        cache = KeysValues(seen)
        prefixes.fill(cache, found)
        cache.used = old
        return cls(
            who=torch.arange(count),
            active=torch.ones(count, dtype=torch.bool),
            budget=torch.tensor([r.max_tokens for r in requests]),
            tokens=torch.from_numpy(tokens).to(device),
            padding=padding,
            positions=torch.tensor([len(r.tokens) for r in requests], device=device),
            temperatures=torch.tensor([r.temperature for r in requests], device=device),
            draws=torch.from_numpy(draws).to(device),
            cache=cache,
            most=most,
        )

    def prefill(self, model: Any) -> Tensor:
        """Return float[B, V]: the logits after the prompts."""
        width = self.tokens.shape[1]
        end = self.cache.used + width
        columns = torch.arange(end, device=self.tokens.device)
        own = columns[self.cache.used :, None]
        # A padding position sees itself: attention over nothing is NaN, and NaN spreads.
        seen = (columns <= own) & self.cache.seen[:, None, :end] | (columns == own)
        steps = torch.arange(width, device=self.tokens.device) - width
        positions = (self.positions[:, None] + steps).clamp(min=0)
        return self._forward(model, self.tokens, seen[:, None], positions)

    def decode(self, model: Any, chosen: Tensor) -> Tensor:
        """Return float[B, V]: the logits after one more token int64[B] each."""
        seen = self.cache.seen[:, None, None, : self.cache.used + 1]
        positions, self.positions = self.positions, self.positions + 1
        return self._forward(model, chosen[:, None], seen, positions[:, None])

    def _forward(self, model: Any, tokens: Tensor, seen: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = model(
            input_ids=tokens,
            attention_mask=seen,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self.cache.advance()
        return logits

    def sample(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens int64[B] and their log-probs float32[B] after temperature; 0 is greedy."""
        greedy = self.temperatures == 0.0
        scaled = logits.float() / torch.where(greedy, 1.0, self.temperatures)[:, None]
        scores = scaled.log_softmax(-1)
        sums = scores.double().exp().cumsum(-1)
        # The first token whose cumulative probability exceeds the draw.
        draws = self.draws[:, step, None] * sums[:, -1:]
        chosen = torch.searchsorted(sums, draws, right=True).clamp(max=sums.shape[1] - 1)[:, 0]
        chosen = torch.where(greedy, scaled.argmax(-1), chosen)
        return chosen, scores.gather(-1, chosen[:, None])[:, 0]

    def at_work(self, chosen: Tensor) -> tuple[list[int], list[int]]:
        """Return requests and tokens of the rows that are not finished."""
        return self.who[self.active].tolist(), chosen.cpu()[self.active].tolist()

    def compact(self, chosen: Tensor, blocks: list[Block]) -> Tensor:
        """Drop finished rows once they are many, keeping their block; return the others' tokens."""
        if self.active.sum() > _COMPACT_BELOW * len(self.active):
            return chosen
        keep, gone = self.active.nonzero()[:, 0], (~self.active).nonzero()[:, 0]
        blocks.append(self.cache.block(gone.to(chosen.device), self.who[gone]))
        there = keep.to(chosen.device)
        self.who, self.budget, self.active = self.who[keep], self.budget[keep], self.active[keep]
        self.positions, self.temperatures = self.positions[there], self.temperatures[there]
        self.draws = self.draws[there]
        self.cache.keep(there)
        return chosen[there]
