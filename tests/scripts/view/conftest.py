"""An index of runs, and a run whose texts are what a stranger would write."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from configs.load import save
from configs.schema import Config, ModelConfig
from learner.health.tokens import TokenFiles
from replay.codec import decode_trajectory, encode_trajectory
from replay.log.event_log import FILE_NAME, EventLog
from replay.log.records import Delivered, EvaluationFinished, GroupOpened, Record, RunStarted
from replay.log.summary import summarise
from replay.protocol import Batch, EvalResult, Lease, SetResult
from replay.trajectory import Question, Sampling, Search, TokenSequence
from scripts.view.index import Index
from tests.learner.health.test_diagnostics import facts
from tests.replay.conftest import trajectory_for
from tests.scripts.conftest import as_text

HIDDEN = "\u200b\u00ad\ufeff\U000e0041"
HOSTILE = (
    f"<script>document.title='owned'</script>\x1b[31m\u202eevil{HIDDEN}\x00 ]]> </script> &amp;"
)
KEPT = "<script>document.title='owned'</script>[31mevil ]]> </script> &amp;"


@pytest.fixture
def index_of(tmp_path: Path) -> Iterator[Callable[..., Index]]:
    """index_of(run, …): an index of all that is in their logs."""
    made = list[Index]()

    def index(*runs: Path) -> Index:
        found = Index(runs, tmp_path / f"index-{len(made)}.sqlite")
        made.append(found)
        read(found)
        return found

    yield index
    for each in made:
        each.close()


def read(index: Index) -> bool:
    """Have it read on."""
    return index.catch_up(threading.Event())


def delivery(number: int, text: str = "", tokenizer: Any = None, **changes: Any) -> list[Record]:
    """A group of one sibling, delivered: whatever can be is `text`."""
    question = Question(f"q-{number}", text or f"question {number}", (text or "kelu",))
    lease = Lease(number, 0, "train", question, Sampling(1.0, 0))
    found = trajectory_for(lease, "actor", 1.0)
    turn = found.turns[0]
    if text:
        name = text[:100]
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        turn = msgspec.structs.replace(
            turn,
            action_tokens=ids,
            behaviour_logprobs=np.full(len(ids), -0.5, np.float32),
            policy_versions=np.zeros(len(ids), np.int32),
            observation_tokens=ids,
            searches=(Search(text, (name,), 0.1, "ok"),),
        )
        only = (TokenSequence(found.prompt_tokens, (turn,), name),)
        found = msgspec.structs.replace(
            found, sequences=only, answer=text, actor_id=name,
            reward_parts={name: 0.5}, timings={name: 0.5},
        )  # fmt: skip
    found = msgspec.structs.replace(found, **changes)
    opened = GroupOpened(1.0, number, "train", question, 1, 0)
    payload = encode_trajectory(found)
    return [opened, Delivered(2.0, "actor", number, 0, payload, summarise(found))]


def keep_tokens(run: Path, batch: Batch) -> Path:
    """Write the values of a batch's tokens: those of the n-th are -n / 64, and every third token is
    masked.
    """
    rollouts = [decode_trajectory(each) for group in batch.groups for each in group]
    named = [
        ((each.group_id, each.sibling, place), sum(len(t.action_tokens) for t in sequence.turns))
        for each in rollouts
        for place, sequence in enumerate(each.sequences)
    ]
    row = torch.arange(len(named)).repeat_interleave(torch.tensor([count for _, count in named]))
    at = torch.arange(len(row))
    given = dict.fromkeys(("current", "proximal", "ratio", "weight", "advantages"), -at / 64)
    parts = [facts(sequences=row, usable=at % 3 > 0, **given)]
    TokenFiles(run, 20, averages=True).write(batch.step, [key for key, _ in named], parts)
    return run / "tokens" / f"step-{batch.step}.safetensors"


@pytest.fixture
def hostile_run(tmp_path: Path, bpe_tokenizer: Any) -> Path:
    """A run whose policy, questions and passages write markup and what a terminal obeys."""
    model, run = tmp_path / "model", tmp_path / "<b>run"
    bpe_tokenizer.save_pretrained(model)
    run.mkdir()
    config = Config(run_dir=str(run), model=ModelConfig(path=str(model)))
    save(config, run / "config.yaml")
    with EventLog.create(run / FILE_NAME) as log:
        log.append([RunStarted(1.0, 0, as_text(config))])
        for number in range(1, 4):
            log.append(delivery(number, HOSTILE, bpe_tokenizer))
        sets = {HOSTILE: SetResult(3, 0.25, None, 1.0)}
        hops = {"1": 0.75, "2": 0.25, HOSTILE: 0.5}
        log.append([
            EvaluationFinished(2.0, EvalResult(0, 3, 0.5, None, hops, {}, 1.0, 0, 0, sets=sets))
        ])  # fmt: skip
        log.sync()
    return run
