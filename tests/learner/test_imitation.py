"""Learning from demonstrations, against plain cross-entropy over what the policy writes."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional

from configs.schema import Config
from learner.errors import Diverged
from learner.imitation import Segment, imitate, lay_out, measure, share_out
from learner.model.engine import Engine
from learner.model.scorer import load_model

Demonstrations = list[list[Segment]]


@pytest.fixture
def demonstrations() -> Demonstrations:
    """Seven of unequal length: read, then written and read in turn, written last."""
    rng = np.random.default_rng(0)

    def tokens(most: int) -> Any:
        return rng.integers(3, 20, int(rng.integers(1, most)), dtype=np.int32)

    return [
        [(tokens(9).tolist(), False)]
        + [pair for _ in range(number % 3) for pair in ((tokens(6), True), (tokens(9), False))]
        + [(tokens(6), True)]
        for number in range(7)
    ]


@pytest.fixture
def in_pieces(config: Config) -> Config:
    """Several micro-batches a step, and a clip that changes nothing."""
    learner = msgspec.structs.replace(config.learner, micro_batch_tokens=40, max_grad_norm=1e9)
    return msgspec.structs.replace(config, learner=learner)


def mean_cross_entropy(model: Any, demonstrations: Demonstrations) -> torch.Tensor:
    """One demonstration at a time, one token at a time."""
    losses = []
    for segments in demonstrations:
        tokens = [int(token) for ids, _ in segments for token in ids]
        own = [mine for ids, mine in segments for _ in ids]
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
        for place, mine in enumerate(own):
            if mine:
                losses.append(-functional.log_softmax(logits[place - 1], -1)[tokens[place]])
    return torch.stack(losses).mean()


def test_rows_are_the_tokens_in_order_and_the_mask_is_what_is_written() -> None:
    (row,) = lay_out([[([3, 4], False), (np.array([5], np.int32), True), ([], False), ([6], True)]])
    assert row.tokens.tolist() == [3, 4, 5, 6] and row.tokens.dtype == np.int64
    assert row.loss_mask.tolist() == [False, False, True, True]
    assert row.coefficient == 0.5


@pytest.mark.parametrize("segments", [[], [([3], True)], [([], False), ([3], True)]])
def test_what_begins_with_nothing_to_read_is_refused(segments: list[Segment]) -> None:
    with pytest.raises(ValueError, match="begins with tokens that the policy reads"):
        lay_out([segments])


def test_the_loss_is_the_mean_cross_entropy_of_what_is_written(
    in_pieces: Config, make_plain_engine: Callable[..., Any], demonstrations: Demonstrations
) -> None:
    engine, model = make_plain_engine(in_pieces), load_model(in_pieces.model)
    (share,) = share_out(demonstrations, 1, in_pieces.learner)
    assert len(share.micro_batches) > 1
    naive = mean_cross_entropy(model, demonstrations)
    naive.backward()
    expected = pytest.approx(naive.item(), rel=1e-5)
    assert measure(engine, share) == expected
    assert imitate(engine, share, 0.0)["learner/loss"] == expected
    for name, weight in model.named_parameters():
        torch.testing.assert_close(engine.gradients[name], weight.grad, rtol=1e-4, atol=1e-6)


def test_the_gauges_count_what_is_read_and_what_is_written(
    in_pieces: Config, make_plain_engine: Callable[..., Any], demonstrations: Demonstrations
) -> None:
    (share,) = share_out(demonstrations, 1, in_pieces.learner)
    gauges = imitate(make_plain_engine(in_pieces), share, 1e-3)
    assert gauges["learner/tokens"] == sum(len(t) for row in demonstrations for t, _ in row)
    assert gauges["learner/action_tokens"] == sum(
        len(tokens) for row in demonstrations for tokens, own in row if own
    )
    assert gauges["learner/lr"] == 1e-3 and gauges["learner/grad_norm"] > 0


def test_the_shares_of_ranks_add_up(
    in_pieces: Config, make_plain_engine: Callable[..., Any], demonstrations: Demonstrations
) -> None:
    engine = make_plain_engine(in_pieces)
    whole = measure(engine, *share_out(demonstrations, 1, in_pieces.learner))
    two = share_out(demonstrations, 1, msgspec.structs.replace(in_pieces.learner, ranks=2))
    assert len(two) == 2 and len(two[0].micro_batches) == len(two[1].micro_batches)
    assert sum(measure(engine, share) for share in two) == pytest.approx(whole, rel=1e-6)


def test_the_engine_learns_what_plain_torch_learns(
    in_pieces: Config, make_plain_engine: Callable[..., Any], demonstrations: Demonstrations
) -> None:
    plain, engine = make_plain_engine(in_pieces), Engine(in_pieces)
    losses: list[list[float]] = [[], []]
    for step in (1, 2, 3):
        (share,) = share_out(demonstrations, step, in_pieces.learner)
        for each, kept in zip((plain, engine), losses, strict=True):
            kept.append(imitate(each, share, 1e-2)["learner/loss"])
    engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1][-1] < losses[1][0]


def test_a_loss_that_is_no_number_is_named_with_its_step(
    in_pieces: Config, make_plain_engine: Callable[..., Any], demonstrations: Demonstrations
) -> None:
    engine = make_plain_engine(in_pieces)
    with torch.no_grad():
        next(iter(engine.trainable().values())).fill_(float("nan"))
    with pytest.raises(Diverged, match="step 5: the loss is nan"):
        imitate(engine, *share_out(demonstrations, 5, in_pieces.learner), 1e-3)
