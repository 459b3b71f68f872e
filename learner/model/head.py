"""The language-model head without its logits: log-probs, entropy and the loss's gradient, a chunk
of tokens at a time.

[N, V] logits would be most of a step's memory. The loss is a sum over tokens, so each chunk's
logits turn in place into their own gradient and are gone before the next chunk. Rows add up in any
order, so chunks only change rounding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

ChunkLoss = Callable[[Tensor, slice], Tensor]  # log-probs of a chunk, as targets -> its loss
ValueLoss = Callable[[Tensor], Tensor]  # a critic's values [B, T] of a micro-batch -> their loss
HeadOutput = tuple[Tensor, Tensor, Tensor | None]  # log-probs, entropies, the loss's value
CHUNK_BYTES = 64 << 20
SLICE_ENTRIES = 4096  # vocabulary entries for which temporaries beside the logits exist


class Candidates(NamedTuple):
    """Some k tokens at each of N positions, and their log-probs there."""

    ids: Tensor  # int32[N, k]
    logprobs: Tensor  # float32[N, k]

    @classmethod
    def room(
        cls, positions: int, k: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> "Candidates":
        """Room for as many, which a pass fills."""
        ids = torch.empty((positions, k), dtype=torch.int32, device=device)
        return cls(ids, torch.empty((positions, k), dtype=dtype, device=device))

    def part(self, chunk: slice) -> "Candidates":
        """Those of these positions."""
        return Candidates(self.ids[chunk], self.logprobs[chunk])


class LogProbHead(nn.Module):  # type: ignore[misc]
    """Scores targets under hidden states; holds the very parameters of the model's output layer.

    A module of its own, so that sharded parameters are gathered when it is called.
    """

    def __init__(
        self,
        output_layer: nn.Linear,
        chunk_bytes: int = CHUNK_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`chunk_bytes` is the largest piece of logits that ever exists, at least one token's;
        `dtype` that of the products which make them, None the weights' own.
        """
        super().__init__()
        self.weight = output_layer.weight
        self.bias = output_layer.bias
        self.chunk_bytes, self.dtype = chunk_bytes, dtype or output_layer.weight.dtype

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        loss: ChunkLoss | None = None,
        bonus: Tensor | None = None,
        *,
        likeliest: Candidates | None = None,
    ) -> HeadOutput:
        """Log-probs as targets and entropies float32[N], detached, and with `loss` the sum of its
        values, less Σ bonus · entropy where there is a `bonus`, float[N] without gradient;
        `likeliest` is filled with the k likeliest tokens, likeliest first.

        hidden [N, H], targets int64[N] or, m to a position, int64[N, m]; logits (products in
        `dtype`; those of the gradient in the weights' own) are divided by `temperature`, and the
        softmax and all sums are in float32 (float64 where the hidden states are). Only the value
        has a gradient: `loss` may depend on the log-probs it is given and on nothing else that is
        trained.
        """
        makes_gradient = loss is not None and torch.is_grad_enabled()
        exact = self.dtype != self.weight.dtype
        task = _Task(
            targets=targets,
            temperature=temperature,
            loss=loss,
            bonus=bonus,
            likeliest=likeliest,
            chunk_bytes=self.chunk_bytes,
            makes_gradient=makes_gradient,
            exact=exact,
        )
        scored: HeadOutput = _ChunkedScores.apply(hidden, self.weight, self.bias, task)
        return scored


@dataclass(frozen=True, slots=True)
class _Task:
    targets: Tensor
    temperature: float
    loss: ChunkLoss | None
    bonus: Tensor | None
    likeliest: Candidates | None
    chunk_bytes: int
    makes_gradient: bool
    exact: bool  # neither operands nor products of the logits are rounded to the weights' dtype


class _ChunkedScores(torch.autograd.Function):  # type: ignore[misc]
    """Backward multiplies the gradients made in forward: it needs neither logits nor weights."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task
    ) -> HeadOutput:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        gradients = _Gradients.begin(hidden, weight, bias, dtype) if task.makes_gradient else None
        logprobs = hidden.new_empty(task.targets.shape, dtype=dtype)
        entropy = hidden.new_empty(len(hidden), dtype=dtype)
        value = None if task.loss is None else hidden.new_zeros((), dtype=dtype)
        for chunk, logits in _chunks(len(hidden), len(weight), dtype, task.chunk_bytes, hidden):
            _fill_logits(logits, hidden[chunk], weight, bias, task)
            targets = task.targets[chunk].reshape(len(logits), -1)
            room = None if task.likeliest is None else task.likeliest.part(chunk)
            found, entropy[chunk], total = _score(logits, targets, task.makes_gradient, room)
            logprobs[chunk] = found.view_as(logprobs[chunk])
            if task.loss is None:
                continue
            share, slope = _evaluate(task.loss, logprobs[chunk], chunk, task.makes_gradient)
            value += share
            if task.bonus is not None:
                value -= (task.bonus[chunk] * entropy[chunk]).sum()
            if gradients is not None:
                # d logprob / d logits = (onehot − p) / temperature; the logits hold total · p now.
                slope = slope.view_as(targets) / task.temperature
                less = None if task.bonus is None else task.bonus[chunk] / task.temperature
                _spread(logits, total, slope.sum(-1, keepdim=True), less, entropy[chunk])
                logits.scatter_add_(-1, targets, slope)
                gradients.add(chunk, logits, hidden[chunk], weight)
        ctx.gradients = gradients
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        ctx.mark_non_differentiable(logprobs, entropy)
        return logprobs, entropy, value

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, _logprobs: Tensor, _entropy: Tensor, upstream: Tensor
    ) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradient of chunked log-probs can be taken only once")
        gradients, ctx.gradients = ctx.gradients, None  # autograd may then keep the buffers
        made = (gradients.hidden, gradients.weight, gradients.bias)
        return (
            *(
                None if gradient is None else gradient.mul_(upstream).to(dtype)
                for gradient, dtype in zip(made, ctx.dtypes, strict=True)
            ),
            None,
        )


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Sums over the chunks, in the dtype of the arithmetic: in bf16, dozens of additions drift."""

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def begin(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> "_Gradients":
        def zeros(like: Tensor | None, wanted: bool) -> Tensor | None:
            return torch.zeros_like(like, dtype=dtype) if wanted and like is not None else None

        return cls(
            torch.zeros_like(hidden, dtype=dtype),
            zeros(weight, weight.requires_grad),
            zeros(bias, bias is not None and bias.requires_grad),
        )

    def add(self, chunk: slice, dlogits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Take in a chunk: dlogits [n, V] and the hidden states [n, H] they belong to."""
        for columns in _columns(weight, dlogits.dtype):
            piece = dlogits[:, columns].to(weight.dtype)
            self.hidden[chunk] += piece @ weight[columns]
            if self.weight is not None and weight.dtype == self.weight.dtype:
                self.weight[columns].addmm_(piece.t(), hidden)
            elif self.weight is not None:
                self.weight[columns] += piece.t() @ hidden
        if self.bias is not None:
            self.bias.add_(dlogits.sum(0))


def _chunks(
    tokens: int, vocabulary: int, dtype: torch.dtype, chunk_bytes: int, like: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the tokens, each with the same [n, V] buffer for its logits."""
    size = min(tokens, max(1, chunk_bytes // (vocabulary * dtype.itemsize)))
    buffer = like.new_empty((size, vocabulary), dtype=dtype)
    for start in range(0, tokens, max(size, 1)):
        chunk = slice(start, min(start + size, tokens))
        yield chunk, buffer[: chunk.stop - start]


def _columns(weight: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """The vocabulary whole where matrix products need no conversion to `dtype`, else in slices."""
    width = len(weight) if weight.dtype == dtype else SLICE_ENTRIES
    for start in range(0, len(weight), width):
        yield slice(start, start + width)


def _fill_logits(
    logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task
) -> None:
    for columns in _columns(weight, logits.dtype):
        part, rows = logits[:, columns], weight[columns]
        shift = None if bias is None else bias[columns]
        if task.exact and weight.dtype != logits.dtype:
            part.copy_(_product(hidden, rows, logits.dtype))
            if shift is not None:
                part.add_(shift)
        elif weight.dtype != logits.dtype:
            part.copy_(functional.linear(hidden, rows, shift))
        elif shift is None:
            torch.mm(hidden, rows.t(), out=part)
        else:
            torch.addmm(shift, hidden, rows.t(), out=part)
    if task.temperature != 1.0:
        logits.div_(task.temperature)


def _product(hidden: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """hidden [n, H] times rows [m, H] transposed: [n, m] in `dtype`, rounded to nothing less."""
    if hidden.is_cuda:  # no copy of either in `dtype`
        return torch.mm(hidden, rows.t(), out_dtype=dtype)
    return hidden.to(dtype) @ rows.to(dtype).t()


def _score(
    logits: Tensor, targets: Tensor, keep_exponents: bool, likeliest: Candidates | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of targets [n, m], entropies [n] and Σ_v exp(z_v) [n, 1], z the logits less their
    row's maximum; `likeliest` is filled.

    The logits are used up; with `keep_exponents` they end as exp(z).
    """
    peak = logits.amax(-1, keepdim=True)
    chosen = logits.gather(-1, targets) - peak
    if likeliest is not None:
        highest, ids = logits.topk(likeliest.ids.shape[-1], dim=-1)
        likeliest.ids.copy_(ids)
    total, weighted = torch.zeros_like(peak), torch.zeros_like(peak)
    for part in logits.split(SLICE_ENTRIES, dim=-1):
        exponents = part.sub_(peak).exp()
        total += exponents.sum(-1, keepdim=True)
        weighted += part.mul_(exponents).sum(-1, keepdim=True)
        if keep_exponents:
            part.copy_(exponents)
    log_total = total.log()
    if likeliest is not None:
        likeliest.logprobs.copy_(highest - peak - log_total)
    return chosen - log_total, (log_total - weighted / total).squeeze(-1), total


def _spread(
    exponents: Tensor, total: Tensor, slope: Tensor, bonus: Tensor | None, entropy: Tensor
) -> None:
    """Turn exp(z) [n, V] into −slope · p − bonus · dH/dz, in place: dH/dz = −p (log p + H).

    slope, total [n, 1], the slope of all targets together; bonus, entropy [n].
    """
    if bonus is None:
        exponents.mul_(-slope / total)
        return
    bonus, entropy = bonus.unsqueeze(-1), entropy.unsqueeze(-1)
    for part in exponents.split(SLICE_ENTRIES, dim=-1):
        chances = part / total
        torch.mul(chances, bonus * entropy - slope, out=part)
        part.addcmul_(torch.special.xlogy(chances, chances), bonus)


def _evaluate(
    loss: ChunkLoss, logprobs: Tensor, chunk: slice, slopes: bool
) -> tuple[Tensor, Tensor]:
    """The chunk's loss, detached, and with `slopes` its derivative by each log-prob."""
    with torch.set_grad_enabled(slopes):
        leaf = logprobs.detach().requires_grad_(slopes)
        share = loss(leaf, chunk)
        if not slopes or not share.requires_grad:
            return share.detach(), torch.zeros_like(logprobs)
        return share.detach(), torch.autograd.grad(share, leaf, materialize_grads=True)[0]
