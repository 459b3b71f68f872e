"""The files of a run's tokens: what they say is what the formulas say, of the right tokens."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from configs.runtime.files import MOST_IDS
from configs.schema import Config
from learner.batch import build, build_shares
from learner.health.tokens import FATES, TokenFiles, file_of
from learner.model.ema import Averages, Ema
from learner.update import update
from replay.codec import decode_trajectory, encode_trajectory
from replay.protocol import Batch
from replay.trajectory import TokenSequence, Trajectory
from tests.learner.health.test_diagnostics import facts

COLUMNS = ("current", "proximal", "ratio", "weight", "advantage")


def with_learner(config: Config, **fields: object) -> Config:
    learner = msgspec.structs.replace(config.learner, micro_batch_tokens=60, **fields)
    return msgspec.structs.replace(config, learner=learner)


def unheard(record: Trajectory) -> Trajectory:
    """The rollout, of whose last token no finite log-prob was recorded."""
    *before, last = record.sequences
    *earlier, turn = last.turns
    logprobs = np.append(turn.behaviour_logprobs[:-1], np.float32(np.nan))
    turns = (*earlier, msgspec.structs.replace(turn, behaviour_logprobs=logprobs))
    sequences = (*before, msgspec.structs.replace(last, turns=turns))
    return msgspec.structs.replace(record, sequences=sequences)


@torch.no_grad()
def naive(model: Any, average: Any, sequence: TokenSequence, credit: float) -> list[list[float]]:
    """Of each sampled token what COLUMNS name, and its fate, from the formulas."""
    ids, found = torch.tensor(sequence.tokens.tolist()), []
    current, proximal = (
        (m(input_ids=ids[None]).logits[0] / 0.7).log_softmax(-1) for m in (model, average)
    )
    at = len(sequence.prompt_tokens)
    for turn in sequence.turns:
        for token, behaviour in zip(turn.action_tokens, turn.behaviour_logprobs, strict=True):
            lp, lo = float(current[at - 1, token]), float(proximal[at - 1, token])
            ratio, weight = np.exp(lp - lo), min(np.exp(lo - behaviour), 2.0)
            clipped = (ratio > 1.28) if credit > 0 else (ratio < 0.8)
            if np.isnan(behaviour):
                found.append([lp, lo, np.nan, 0.0, credit, FATES.index("masked")])
            else:
                fate = FATES.index("clipped" if clipped else "trained")
                found.append([lp, lo, ratio, weight, credit, fate])
            at += 1
        at += len(turn.observation_tokens)
    return found


def test_a_file_says_of_each_sampled_token_what_the_formulas_say(
    config: Config, make_plain_engine: Callable[..., Any], batch: Callable[..., Batch]
) -> None:
    config = with_learner(config)
    engine, twin = make_plain_engine(config), make_plain_engine(config)
    average = make_plain_engine(config).model
    ema = Averages(Ema(engine, 0.8), None)
    for each in (engine, twin):
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in each.trainable().values():
                weight += 0.05 * torch.randn_like(weight)
    given = batch(sequences=3)
    groups = [[unheard(decode_trajectory(each)) for each in group] for group in given.groups]
    payloads = tuple(tuple(map(encode_trajectory, group)) for group in groups)
    given = msgspec.structs.replace(given, groups=payloads)
    training = build(given, config.learner, MOST_IDS)
    files = TokenFiles(config.run_dir, 20, averages=True)
    update(engine, ema, training, config.learner, note=files.write)
    found = load_file(path := file_of(config.run_dir, 1))
    expected, keys = [], []
    rewards = torch.tensor([[record.reward for record in group] for group in groups])
    credits = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-6)
    for record, credit in zip(chain(*groups), credits.flatten().tolist(), strict=True):
        for place, sequence in enumerate(record.sequences):
            own = naive(twin.model, average, sequence, credit)
            keys.append([record.group_id, record.sibling, place, len(own)])
            expected += own
    table = np.array(expected).T
    assert len(training.micro_batches) > 1 and found["sequences"].tolist() == keys
    for name, values in zip(COLUMNS, table[:-1], strict=True):
        assert found[name].dtype == np.float16, name
        np.testing.assert_allclose(found[name], values, rtol=2e-3, atol=1e-3, err_msg=name)
    assert found["fate"].tolist() == table[-1].tolist() and {*table[-1]} == {0, 1, 3}
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "1", "step": "1"}


def test_a_token_that_is_rejected_says_so(
    config: Config, make_plain_engine: Callable[..., Any], batch: Callable[..., Batch]
) -> None:
    config = with_learner(config, proximal="behaviour", rejection="binary_kl", rejection_bound=0.1)
    files = TokenFiles(config.run_dir, 20, averages=False)
    training = build(batch(), config.learner, MOST_IDS)
    engine = make_plain_engine(config)
    update(engine, Averages(None, None), training, config.learner, note=files.write)
    found = load_file(file_of(config.run_dir, 1))
    rejected = found["fate"] == FATES.index("rejected")
    assert "proximal" not in found and rejected.any() and not rejected.all()
    assert (found["weight"] == np.where(rejected, 0.0, 1.0)).all()


def test_what_several_ranks_say_is_put_in_order(tmp_path: Path) -> None:
    parts = [
        facts(sequences=[2, 2, 0], current=[-1.0, -2.0, -3.0], ratio=[1.0, 1.0, 1e9]),
        facts(sequences=[1], current=[-np.inf]),
    ]
    keys = ((1, 0, 0), (1, 1, 0), (1, 1, 1), (2, 0, 0))
    TokenFiles(tmp_path, 1, averages=False).write(7, keys, parts)
    found = load_file(file_of(tmp_path, 7))
    assert found["sequences"].tolist() == [[1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 2], [2, 0, 0, 0]]
    assert found["current"].tolist() == [-3.0, -65504.0, -1.0, -2.0]
    assert found["ratio"].tolist() == [65504.0, 0.0, 1.0, 1.0]


def test_rank_0_alone_names_the_sequences_of_all(batch: Callable[..., Batch]) -> None:
    learner = Config().learner
    given = batch(sequences=2)
    first, second = build_shares(given, msgspec.structs.replace(learner, ranks=2), MOST_IDS)
    keys = ((1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 2, 0), (2, 0, 0), (2, 1, 0), (2, 1, 1), (2, 2, 0))
    assert first.sequences == keys and second.sequences == ()


def written(folder: Path, keep: int, steps: Sequence[int]) -> list[str]:
    files, parts = TokenFiles(folder, keep, averages=False), [facts(sequences=[0])]
    for step in steps:
        files.write(step, ((1, 0, 0),), parts)
    return sorted(path.name for path in (folder / "tokens").iterdir())


def test_the_newest_steps_are_kept(tmp_path: Path) -> None:
    assert written(tmp_path, 2, [1, 2, 3]) == ["step-2.safetensors", "step-3.safetensors"]
    folder = tmp_path / "tokens"
    for name in ("step-1.safetensors.draft", "step-9.safetensors", "notes"):
        (folder / name).touch()
    # One that went back to step 3 leaves what it is to write over
    assert written(tmp_path, 1, [4]) == ["notes", "step-4.safetensors", "step-9.safetensors"]


def test_a_disk_that_takes_nothing_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    files, parts = TokenFiles(tmp_path, 2, averages=False), [facts(sequences=[0])]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        for step in (1, 2):
            files.write(step, ((1, 0, 0),), parts)
    assert not any((tmp_path / "tokens").iterdir())
    (said,) = caplog.messages
    assert f"{file_of(tmp_path, 1)}: the values of its tokens are not kept: " in said
    files.write(3, ((1, 0, 0),), parts)
    assert file_of(tmp_path, 3).exists() and len(caplog.messages) == 1
