"""Gathered columns on a group of one: order, dtypes and sizes as they were brought."""

from dataclasses import fields

import torch
from torch import distributed

from configs.schema import LearnerConfig
from learner.health.diagnostics import TokenFacts
from learner.model.collectives import gather_facts, sums
from learner.model.engine import join_process_group
from learner.model.placement import Placement

DTYPES = {
    "rows": torch.int64,
    "usable": torch.bool,
    "clipped": torch.bool,
    "rejected": torch.bool,
    "guarded": torch.bool,
    "staleness": torch.int32,
}
CPU = torch.device("cpu")


def facts(count: int) -> TokenFacts:
    drawn = {field.name: torch.randn(count) for field in fields(TokenFacts)}
    return TokenFacts(**{n: value.to(DTYPES.get(n, value.dtype)) for n, value in drawn.items()})


def test_what_is_gathered_is_what_was_brought() -> None:
    if not distributed.is_initialized():
        join_process_group(distributed.HashStore(), Placement.on_one_host(0, 1), LearnerConfig())
    brought = [facts(3), facts(0), facts(5)]
    for one, other in zip(gather_facts(brought, CPU), brought, strict=True):
        for field in fields(TokenFacts):
            found, expected = getattr(one, field.name), getattr(other, field.name)
            assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert sums([0.1, 2.0], CPU) == [0.1, 2.0]
