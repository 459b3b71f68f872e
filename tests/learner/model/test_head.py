"""The chunked head against log_softmax over whole logits: values, gradients, and what never is."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from learner.algorithm import kl
from learner.model import head as heads
from learner.model.head import Candidates, LogProbHead
from learner.model.scorer import TokenScores, score_logits

HIDDEN = 7


class Case(NamedTuple):
    """A head, what it scores, and a loss that is curved, weighed and on some tokens flat."""

    layer: nn.Linear
    hidden: Tensor
    targets: Tensor
    weights: Tensor

    def loss(self, logprobs: Tensor, chunk: slice) -> Tensor:
        return (self.weights[chunk] * logprobs.exp() * (2.0 - logprobs)).sum()


def draw(
    seed: int, tokens: int = 9, vocabulary: int = 13, bias: bool = True, dtype=torch.float32
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(HIDDEN, vocabulary, bias=bias).to(dtype)
    for weight in layer.parameters():
        weight.data.normal_(generator=generator)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    weights = torch.randn(tokens, generator=generator).to(dtype)
    return Case(layer, hidden, targets, weights * (weights > -1.0))


def naive(case: Case, temperature: float) -> tuple[TokenScores, Tensor]:
    scores = score_logits(case.layer(case.hidden), case.targets, temperature)
    return scores, case.loss(scores.logprobs, slice(None))


def gradients(case: Case, value: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(value, [case.hidden, *case.layer.parameters()]))


def compare(case: Case, chunk_bytes: int, temperature: float, atol: float = 1e-5) -> None:
    scores, expected = naive(case, temperature)
    logprobs, entropy, value = LogProbHead(case.layer, chunk_bytes)(
        case.hidden, case.targets, temperature, case.loss
    )
    close = {"rtol": atol, "atol": atol}
    torch.testing.assert_close(logprobs, scores.logprobs.detach(), **close)
    torch.testing.assert_close(entropy, scores.entropy, **close)
    torch.testing.assert_close(value, expected, **close)
    for ours, theirs in zip(gradients(case, value), gradients(case, expected), strict=True):
        torch.testing.assert_close(ours, theirs, **close)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 40),
    vocabulary=st.integers(1, 30),
    bias=st.booleans(),
    chunk_bytes=st.integers(1, 2000),
    temperature=st.floats(0.3, 2.0),
)
def test_values_and_gradients_are_those_of_whole_logits(
    seed: int, tokens: int, vocabulary: int, bias: bool, chunk_bytes: int, temperature: float
) -> None:
    compare(draw(seed, tokens, vocabulary, bias), chunk_bytes, temperature)


def test_a_vocabulary_of_several_slices() -> None:
    compare(draw(1, 5, 2 * heads.SLICE_ENTRIES + 3), 3 * 4 * 2 * heads.SLICE_ENTRIES, 0.8)


@pytest.mark.parametrize("vocabulary", [13, heads.SLICE_ENTRIES + 3])
@pytest.mark.parametrize(("temperature", "candidates"), [(1.0, 0), (0.6, 0), (0.6, 3)])
def test_an_entropy_bonus_has_the_entropy_s_own_gradient(
    vocabulary: int, temperature: float, candidates: int
) -> None:
    case = draw(3, 9, vocabulary, dtype=torch.float64)
    bonus = torch.rand(9, dtype=torch.float64)
    targets = torch.cat([case.targets[:, None], torch.randint(13, (9, candidates))], -1)

    def loss(logprobs: Tensor, chunk: slice) -> Tensor:
        return case.loss(logprobs.reshape(len(logprobs), -1).mean(-1), chunk)

    head = LogProbHead(case.layer, 4 * 8 * vocabulary)
    given = targets if candidates else case.targets
    value = head(case.hidden, given, temperature, loss, bonus)[2]
    whole = (case.layer(case.hidden) / temperature).log_softmax(-1)
    entropy = -(whole.exp() * whole).sum(-1)
    expected = loss(whole.gather(-1, targets), slice(None)) - (bonus * entropy).sum()
    torch.testing.assert_close(value, expected)
    for ours, theirs in zip(gradients(case, value), gradients(case, expected), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_of_an_impossible_token_entropy_has_no_gradient() -> None:
    layer = nn.Linear(1, 3, bias=False).double()
    layer.weight.data = torch.tensor([[0.0], [1.0], [-2000.0]]).double()
    hidden = torch.ones(1, 1).double().requires_grad_()
    loss = lambda logprobs, chunk: 0.0 * logprobs.sum()  # noqa: E731
    _, _, value = LogProbHead(layer)(hidden, torch.tensor([0]), 1.0, loss, torch.ones(1).double())
    [slope] = torch.autograd.grad(value, layer.weight)
    p = 1 / (1 + math.e)
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert slope[:, 0].tolist() == pytest.approx(
        [p * (math.log(p) + entropy), (1 - p) * (math.log(1 - p) + entropy), 0.0]
    )


@pytest.mark.parametrize("vocabulary", [30, heads.SLICE_ENTRIES + 5])
def test_bf16_is_as_near_as_its_own_rounding(vocabulary: int) -> None:
    case = draw(2, 20, vocabulary, dtype=torch.bfloat16)
    logprobs, entropy, value = LogProbHead(case.layer, 8 * 4 * vocabulary)(
        case.hidden, case.targets, 1.0, case.loss
    )
    scores, expected = naive(case, 1.0)
    assert logprobs.dtype == entropy.dtype == value.dtype == torch.float32
    torch.testing.assert_close(logprobs, scores.logprobs.detach(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(case, value), gradients(case, expected), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=1e-2)


@pytest.mark.parametrize("vocabulary", [30, heads.SLICE_ENTRIES + 5])
@pytest.mark.parametrize("bias", [True, False])
def test_products_in_float32_round_neither_operand_nor_logit(vocabulary: int, bias: bool) -> None:
    case = draw(2, 20, vocabulary, bias, dtype=torch.bfloat16)
    whole = case.hidden.float() @ case.layer.weight.float().t()
    whole = whole + case.layer.bias.float() if bias else whole
    scores = score_logits(whole, case.targets, 0.7)
    coarse, exact = (
        LogProbHead(case.layer, 8 * 4 * vocabulary, dtype)(
            case.hidden, case.targets, 0.7, case.loss
        )
        for dtype in (None, torch.float32)
    )
    torch.testing.assert_close(exact[0], scores.logprobs.detach(), rtol=1e-5, atol=1e-5)
    assert (coarse[0] - scores.logprobs).abs().max() > 1e-3
    expected = gradients(case, case.loss(scores.logprobs, slice(None)))
    for ours, theirs in zip(gradients(case, exact[2]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=1e-2)


def test_the_gradient_is_that_of_finite_differences() -> None:
    case = draw(3, 6, 11, dtype=torch.float64)
    head = LogProbHead(case.layer, 2 * 11 * 8)

    inputs = [case.hidden, *case.layer.parameters()]
    value = head(case.hidden, case.targets, 0.7, case.loss)[2]
    for tensor, gradient in zip(inputs, gradients(case, 3.0 * value), strict=True):
        direction, sides = torch.randn_like(tensor), []
        for sign in (1.0, -1.0, -1.0, 1.0):  # there and back
            tensor.data.add_(sign * 1e-5 * direction)
            sides.append(head(case.hidden, case.targets, 0.7, case.loss)[2].item())
        expected = 3.0 * (sides[0] - sides[2]) / 2e-5
        assert float((gradient * direction).sum()) == pytest.approx(expected, rel=1e-6)


def test_a_chunk_sees_its_own_tokens_and_a_buffer_within_the_budget() -> None:
    case, seen = draw(4, 10, 13), []

    def loss(logprobs: Tensor, chunk: slice) -> Tensor:
        seen.append((chunk.start, chunk.stop, len(logprobs)))
        return case.loss(logprobs, chunk)

    LogProbHead(case.layer, 4 * 13 * 4 + 3)(case.hidden, case.targets, 1.0, loss)
    assert seen == [(0, 4, 4), (4, 8, 4), (8, 10, 2)]


def test_without_tokens_the_loss_is_0_and_so_is_every_gradient() -> None:
    case = draw(5, 0)
    logprobs, entropy, value = LogProbHead(case.layer)(case.hidden, case.targets, 1.0, case.loss)
    assert logprobs.shape == entropy.shape == (0,) and value.item() == 0.0
    assert [g.abs().sum().item() for g in gradients(case, value)] == [0.0, 0.0, 0.0]


def test_only_the_value_has_a_gradient_and_only_where_one_is_asked_for() -> None:
    case = draw(6)
    head = LogProbHead(case.layer)
    logprobs, entropy, value = head(case.hidden, case.targets, 1.0, case.loss)
    assert value.requires_grad and not logprobs.requires_grad and not entropy.requires_grad
    assert head(case.hidden, case.targets, 1.0)[2] is None
    with torch.no_grad():
        assert head(case.hidden, case.targets, 1.0, case.loss)[2].item() == value.item()


def test_frozen_weights_get_no_gradient_and_a_loss_without_one_gives_zeros() -> None:
    case = draw(7)
    case.layer.requires_grad_(False)
    value = LogProbHead(case.layer)(
        case.hidden, case.targets, 1.0, lambda logprobs, _: 0.0 * logprobs.detach().sum()
    )[2]
    value.backward()
    assert case.layer.weight.grad is None and not case.hidden.grad.any()


def test_backward_twice_is_refused() -> None:
    case = draw(8)
    value = LogProbHead(case.layer)(case.hidden, case.targets, 1.0, case.loss)[2]
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        value.backward()


def test_shares_of_micro_batches_add_up_in_the_weight() -> None:
    case = draw(9)
    _, expected = naive(case, 1.0)
    head = LogProbHead(case.layer)
    for part in (slice(0, 4), slice(4, 9)):
        own = Case(case.layer, case.hidden[part], case.targets[part], case.weights[part])
        head(own.hidden, own.targets, 1.0, own.loss)[2].backward()
    whole = torch.autograd.grad(expected, case.layer.weight)[0]
    torch.testing.assert_close(case.layer.weight.grad, whole, rtol=1e-5, atol=1e-5)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(0, 12),
    vocabulary=st.integers(2, 30),
    chunk_bytes=st.integers(1, 2000),
    temperature=st.floats(0.3, 2.0),
)
def test_several_targets_to_a_position_have_the_values_and_gradients_of_whole_logits(
    seed: int, tokens: int, vocabulary: int, chunk_bytes: int, temperature: float
) -> None:
    case = draw(seed, tokens, vocabulary)
    targets = torch.randint(vocabulary, (tokens, 3))  # one may stand there twice

    def loss(logprobs: Tensor, chunk: slice) -> Tensor:
        return (case.weights[chunk, None] * logprobs.exp() * (2.0 - logprobs.sum(-1, True))).sum()

    given = case.hidden, targets, temperature, loss
    logprobs, _, value = LogProbHead(case.layer, chunk_bytes)(*given)
    whole = (case.layer(case.hidden) / temperature).log_softmax(-1).gather(-1, targets)
    expected = loss(whole, slice(None))
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(logprobs, whole.detach(), **close)
    torch.testing.assert_close(value, expected, **close)
    for ours, theirs in zip(gradients(case, value), gradients(case, expected), strict=True):
        torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("k", [1, 4, 13])
def test_the_likeliest_are_those_of_whole_logits(k: int) -> None:
    case = draw(10)
    found = Candidates.room(9, k, torch.device("cpu"))
    head = LogProbHead(case.layer, 4 * 13 * 4)
    logprobs, entropy, _ = head(case.hidden, case.targets, 0.7, likeliest=found)
    whole = (case.layer(case.hidden) / 0.7).log_softmax(-1).detach().topk(k)
    assert torch.equal(found.ids.long(), whole.indices)
    torch.testing.assert_close(found.logprobs, whole.values, rtol=1e-5, atol=1e-5)
    plain = LogProbHead(case.layer, 4 * 13 * 4)(case.hidden, case.targets, 0.7)
    assert torch.equal(logprobs, plain[0]) and torch.equal(entropy, plain[1])


def exact_kl(current: Tensor, reference: Tensor, direction: str) -> Tensor:
    one, other = (current, reference) if direction == "reverse" else (reference, current)
    return (one.exp() * (one - other)).sum(-1)


def over_candidates(case: Case, far: nn.Linear, k: int, direction: str) -> Tensor:
    """The weighed KL to another head, whose likeliest tokens come from a pass of its own."""
    device, dtype = torch.device("cpu"), torch.float64
    found, weights = Candidates.room(len(case.hidden), k, device, dtype), case.weights.double()
    small = 3 * 13 * 8  # three tokens to a chunk
    with torch.no_grad():
        reference = LogProbHead(far, small)(case.hidden, case.targets, 0.7, likeliest=found)[0]
    outside = (found.ids != case.targets[:, None]).all(-1)
    topk = kl.TopK(found.logprobs, outside, direction)

    def loss(logprobs: Tensor, chunk: slice) -> Tensor:
        parts = topk.part(chunk).parts(logprobs, reference[chunk])
        return (weights[chunk] * (parts.head + parts.tail)).sum()

    targets = torch.cat([case.targets[:, None], found.ids.long()], -1)
    return LogProbHead(case.layer, small)(case.hidden, targets, 0.7, loss)[2]


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_over_the_whole_vocabulary_it_is_the_exact_kl_and_its_gradient(direction: str) -> None:
    case, far = draw(11, dtype=torch.float64), draw(12, dtype=torch.float64).layer
    value = over_candidates(case, far, 13, direction)
    current, reference = ((layer(case.hidden) / 0.7).log_softmax(-1) for layer in (case.layer, far))
    expected = (case.weights * exact_kl(current, reference.detach(), direction)).sum()
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(gradients(case, value), gradients(case, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_over_some_it_is_on_average(direction: str, k: int) -> None:
    one, far = draw(13, 1, dtype=torch.float64), draw(14, dtype=torch.float64).layer
    with torch.no_grad():
        chances = (one.layer(one.hidden) / 0.7).softmax(-1)[0]
    every = Case(one.layer, one.hidden.expand(13, -1), torch.arange(13), chances)
    value = over_candidates(every, far, k, direction)
    current, reference = ((layer(one.hidden) / 0.7).log_softmax(-1) for layer in (one.layer, far))
    expected = exact_kl(current, reference.detach(), direction).sum()
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(gradients(one, value), gradients(one, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
