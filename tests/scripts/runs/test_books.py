"""Records and payloads that were changed, checksums and all, are named by the books: which record,
whose, which field, and both values.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from configs.schema import Config, LearnerConfig, ReplayConfig
from replay.log.event_log import FILE_NAME, SEGMENT_BYTES, EventLog, read
from replay.log.format import FRAME, HEADER, framed
from replay.log.records import (
    Compacted,
    Delivered,
    EvaluationFinished,
    GroupOpened,
    Leased,
    Record,
    RunStarted,
    Sampled,
    StepsCommitted,
    Superseded,
)
from scripts import cli
from scripts.runs.books import Audit
from tests.scripts.conftest import RecordedRun

OLD = np.zeros(4, np.int32).tobytes()


@dataclass(frozen=True)
class Run:
    """A run's directory."""

    path: Path

    def append(self, *facts: Record) -> None:
        with EventLog.open(self.path / FILE_NAME) as log:
            log.append(facts)


def folded(run: Run) -> Audit:
    found = Audit()
    found.fold(run.path / FILE_NAME)
    return found


def rewritten(run: Run, change: Callable[[Any], Record]) -> Audit:
    """The books of a log whose every record went through `change`, each with a sound checksum."""
    log = run.path / FILE_NAME
    facts = [change(fact) for fact in read(log)]
    frames = [framed(msgspec.msgpack.encode(fact), n) for n, fact in enumerate(facts)]
    log.write_bytes(log.read_bytes()[: HEADER.size] + b"".join(frames))
    return folded(run)


def payload_of(run: Run, group_id: int, sibling: int) -> bytes:
    facts = [fact for fact in read(run.path / FILE_NAME) if isinstance(fact, Delivered)]
    return next(f.payload for f in facts if (f.group_id, f.sibling) == (group_id, sibling))


def with_payload(
    change: Callable[[dict[str, Any]], None], group_id: int = 3, sibling: int = 0
) -> Callable[[Record], Record]:
    """Change what the payload of one sibling holds."""

    def changed(fact: Record) -> Record:
        mine = isinstance(fact, Delivered) and (fact.group_id, fact.sibling) == (group_id, sibling)
        if not mine:
            return fact
        payload = msgspec.msgpack.decode(fact.payload)
        change(payload)
        return msgspec.structs.replace(fact, payload=msgspec.msgpack.encode(payload))

    return changed


def only(kind: type, **fields: Any) -> Callable[[Record], Record]:
    """Give fields of all records of a kind other values."""
    return lambda fact: msgspec.structs.replace(fact, **fields) if isinstance(fact, kind) else fact


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The log of an evaluation and two steps, the first one committed; groups 3 and 4 are of the
    second.
    """
    config = Config(
        replay=ReplayConfig(groups_per_step=2, group_size=2, max_staleness=0),
        learner=LearnerConfig(total_steps=3),
    )
    run = RecordedRun(tmp_path_factory.mktemp("recorded"), config, SEGMENT_BYTES)
    run.evaluate(0)
    run.train(0)
    run.train(1)
    run.append(StepsCommitted(2.0, 1, 1))
    run.log.close()
    return (run.path / FILE_NAME).read_bytes()


@pytest.fixture
def trained(recorded: bytes, tmp_path: Path) -> Run:
    """A run with that log."""
    (tmp_path / FILE_NAME).write_bytes(recorded)
    return Run(tmp_path)


def test_a_run_that_was_only_recorded_closes(trained: Run) -> None:
    found = folded(trained)
    assert found.faults == [] and found.summary()["payloads"] == {"decoded": 12}


def number_of(run: Run, group_id: int, sibling: int) -> int:
    facts = enumerate(read(run.path / FILE_NAME))
    return next(
        n
        for n, f in facts
        if isinstance(f, Delivered) and (f.group_id, f.sibling) == (group_id, sibling)
    )


def make_old(payload: dict[str, Any]) -> None:
    payload["sequences"][0]["turns"][1]["policy_versions"] = OLD


def test_tokens_of_a_version_too_old_in_a_late_group(trained: Run) -> None:
    faults = rewritten(trained, with_payload(make_old)).faults
    who = f"record {number_of(trained, 3, 0)}: sibling 0 of group 3"
    assert f"{who}: oldest_version: the record says 1, its payload 0" in faults
    assert f"{who}: oldest_version: 0 in a group opened under 1" in faults
    assert any("group 3 was 1 steps old at step 2: more than 0" in fault for fault in faults)


def test_summary_and_payload_that_agree_on_a_version_too_old(trained: Run) -> None:
    def change(fact: Any) -> Record:
        fact = with_payload(make_old)(fact)
        if not (isinstance(fact, Delivered) and fact.group_id == 3 and fact.sibling == 0):
            return fact
        summary = msgspec.structs.replace(fact.summary, oldest_version=0)
        return msgspec.structs.replace(fact, summary=summary)

    faults = rewritten(trained, change).faults
    assert any("group 3 was 1 steps old at step 2" in fault for fault in faults)


def test_the_trajectory_of_another_question_in_place(trained: Run) -> None:
    foreign = payload_of(trained, 4, 0)

    def change(fact: Any) -> Record:
        mine = isinstance(fact, Delivered) and (fact.group_id, fact.sibling) == (3, 0)
        return msgspec.structs.replace(fact, payload=foreign) if mine else fact

    questions = [
        f.question.id for f in read(trained.path / FILE_NAME) if isinstance(f, GroupOpened)
    ]
    mine, other = questions[-2:]
    faults = rewritten(trained, change).faults
    who = f"record {number_of(trained, 3, 0)}: sibling 0 of group 3"
    assert f"{who}: group_id: the record says 3, its payload 4" in faults
    assert f"{who}: question_id: the record says {mine}, its payload {other}" in faults


def test_another_question_under_this_ones_ids_has_another_answer(trained: Run) -> None:
    def change(payload: dict[str, Any]) -> None:
        payload["reference_tokens"] = OLD

    faults = rewritten(trained, with_payload(change, 3, 1)).faults
    assert [fault.partition(": reference")[2] for fault in faults] == [
        "_tokens: not those of its siblings: another question's answer"
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward", 0.5), ("reward", None), ("searches", 7), ("malformed", 1), ("turns", 3),
        ("action_tokens", 9), ("oldest_version", 0), ("newest_version", 2), ("question_id", "q-0"),
        ("kind", "eval"), ("group_id", 9), ("sibling", 1), ("reward_cause", "down"),
        ("sequences", 2),
    ],
)  # fmt: skip
def test_each_claim_of_a_summary_is_reckoned_again(trained: Run, field: str, value: Any) -> None:
    def change(fact: Any) -> Record:
        if not (isinstance(fact, Delivered) and (fact.group_id, fact.sibling) == (4, 0)):
            return fact
        summary = msgspec.structs.replace(fact.summary, **{field: value})
        return msgspec.structs.replace(fact, summary=summary)

    found = rewritten(trained, change)
    named = f"record {number_of(trained, 4, 0)}: sibling 0 of group 4: {field}: the record says"
    assert found.fault_count == 1 and found.faults[0].startswith(f"{named} {value}, its payload ")


def turn(payload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = payload["sequences"][0]["turns"][1]
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: turn(p).update(behaviour_logprobs=b"1234"), "turns[1]: 4 action tokens, 1 log-"),
        (lambda p: turn(p).update(policy_versions=b""), "4 log-probs, 0 policy versions"),
        (lambda p: turn(p).update(action_tokens=b"12345"), "tokens of 5 and 0 bytes"),
        (lambda p: turn(p).update(started_at=9.0), "started at 9.0"),
        (lambda p: turn(p).update(reward=float("nan")), "no number"),
        (lambda p: p["sequences"][0].update(prompt_tokens=b""), "prompt_tokens of 0 bytes"),
        (lambda p: p["sequences"].clear(), "0 sequences"),
        (lambda p: p.update(reward=None), "no reward, and no reward_cause"),
        (lambda p: p.update(stop_reason="bored"), "payload: Invalid enum value 'bored'"),
        (lambda p: p.update(reward=float("inf")), "a reward of inf"),
        (lambda p: p.update(more=1), "unknown field `more`"),
        (lambda p: p.pop("answer"), "missing required field `answer`"),
        (lambda p: p.update(attempt=2), "attempt: the record says 0, its payload 2"),
        (lambda p: p.update(actor_id="x"), "actor_id: the record says actor, its payload x"),
        (lambda p: p["sampling"].update(seed=9), "seed: the record says 0, its payload 9"),
        (lambda p: p["sampling"].update(temperature=0.0), "temperature: the record says 1.0"),
        (
            lambda p: turn(p).update(policy_versions=np.full(4, 9, np.int32).tobytes()),
            "newest_version: 9, and no step beyond 1 was sampled",
        ),
    ],
)
def test_what_no_payload_of_this_run_can_hold(
    trained: Run, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    faults = rewritten(trained, with_payload(change)).faults
    who = f"record {number_of(trained, 3, 0)}: sibling 0 of group 3: "
    assert any(fault.startswith(who) and words in fault for fault in faults), faults


@pytest.fixture
def several(tmp_path: Path) -> Run:
    """A run whose second step has rollouts of three sequences; groups 3 and 4 are of it."""
    config = Config(
        replay=ReplayConfig(groups_per_step=2, group_size=2, max_staleness=0),
        learner=LearnerConfig(total_steps=3),
    )
    run = RecordedRun(tmp_path, config, SEGMENT_BYTES)
    run.train(0)
    run.train(1, sequences=3)
    run.log.close()
    return Run(tmp_path)


def test_rollouts_of_several_sequences_are_counted_and_said(
    several: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    found = folded(several)
    assert found.faults == []
    told = {"rollouts": 8, "sequences": 16, "merged whole": 0.5}
    assert found.summary()["merging"] == told
    assert cli.main(["audit", str(several.path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "8 rollouts have 16 sequences; 50.0 % have one" in said


def test_a_run_of_single_sequences_says_nothing_of_them(
    trained: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folded(trained).summary()["merging"]["merged whole"] == 1.0
    assert cli.main(["audit", str(trained.path)]) == 0
    assert "sequences" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: s[1]["turns"][1].update(policy_versions=OLD),
            "sequences[1]: oldest_version: 0 in a group opened under 1",
        ),
        (
            lambda s: s[2]["turns"][0].update(policy_versions=np.full(4, 9, np.int32).tobytes()),
            "sequences[2]: newest_version: 9, and no step beyond 1 was sampled",
        ),
        (lambda s: s[2].update(name="2"), "payload: sequences[2]: it is named '2', not '3'"),
        (lambda s: s[0].update(name="zz"), "payload: sequences[0]: it is named 'zz', not ''"),
        (
            lambda s: s.reverse(),
            "payload: sequences[0]: it is named '3', not ''; sequences[2]: it is named '', not '3'",
        ),
        (
            lambda s: s[1]["turns"][0].update(started_at=-9.0),
            "payload: sequences[1]: asked for at -9.0, before the one that it follows",
        ),
        (lambda s: s[1].update(turns=[]), "payload: sequences[1]: 0 turns: 1 to 1024"),
        (lambda s: s.pop(), "sequences: the record says 3, its payload 2"),
    ],
)
def test_what_is_wrong_with_a_sequence_is_named(
    several: Run, change: Callable[[list[dict[str, Any]]], None], words: str
) -> None:
    faults = rewritten(several, with_payload(lambda p: change(p["sequences"]))).faults
    who = f"record {number_of(several, 3, 0)}: sibling 0 of group 3: "
    assert who + words in faults, faults


def test_the_result_of_an_evaluation_is_reckoned_again(trained: Run) -> None:
    (fact,) = [f for f in read(trained.path / FILE_NAME) if isinstance(f, EvaluationFinished)]
    other = msgspec.structs.replace(fact.result, em=0.75, em_by_hops={"1": 0.75})
    faults = rewritten(trained, only(EvaluationFinished, result=other)).faults
    assert [fault.partition(": ")[2] for fault in faults] == [
        f"evaluation of step 0: em: the record says 0.75, the payloads {fact.result.em}",
        "evaluation of step 0: em_by_hops: the record says {'1': 0.75}, the payloads "
        f"{fact.result.em_by_hops}",
    ]


def test_what_replay_said_of_a_batch_is_reckoned_again(trained: Run) -> None:
    faults = rewritten(trained, only(Sampled, gauges={"replay/staleness": 3.0})).faults
    assert any("step 2: replay/staleness: the record says 3, its payloads 0" in f for f in faults)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (only(Leased, attempts=(2, 2)), "attempt 2: 0 to 0 may have failed before"),
        (only(Leased, attempts=()), "siblings were leased, 0 attempts"),
        (only(GroupOpened, version=9), "opened under version 9: no step beyond 0 was"),
        (only(GroupOpened, evaluation=5), "of the evaluation of step 5, which is not under way"),
        (only(Sampled, group_ids=(1,)), "step 1 has 1 groups, not 2"),
        (only(StepsCommitted, step=9), "step 9 was committed, but 2 was the last put together"),
    ],
)
def test_records_that_contradict_the_run(
    trained: Run, change: Callable[[Record], Record], words: str
) -> None:
    faults = rewritten(trained, change).faults
    assert any(words in fault for fault in faults), faults


def test_groups_beyond_what_the_steps_can_hold(trained: Run) -> None:
    question = [f for f in read(trained.path / FILE_NAME) if isinstance(f, GroupOpened)][-1]
    again = [msgspec.structs.replace(question, group_id=n, version=1) for n in (5, 6, 7)]
    trained.append(*again)
    assert (
        folded(trained)
        .faults[0]
        .endswith(
            "group 5 was opened under version 1 behind 4 others: fewer than 4 may stand there"
        )
    )


def test_a_delivery_that_was_not_needed_says_why(trained: Run) -> None:
    trained.append(Superseded(3.0, "actor", 3, 0, "dropped"))
    assert "was dropped, but it is superseded" in folded(trained).faults[0]


def test_compacted_payloads_are_counted_and_said(trained: Run, capsys: Any) -> None:
    """Those of groups 1 and 2 are settled; group 3's may still be asked for."""

    def compacted(*groups: int, versions: int = 0) -> Callable[[Any], Record]:
        def change(fact: Any) -> Record:
            if not (isinstance(fact, Delivered) and fact.group_id in groups):
                return fact
            left = Compacted(len(fact.payload), versions)
            return msgspec.structs.replace(fact, payload=b"", compacted=left)

        return change

    found = rewritten(trained, compacted(1, 2))
    assert found.faults == [] and found.summary()["payloads"]["compacted away"] == 4
    assert cli.main(["audit", str(trained.path)]) == 0
    assert "4 were compacted away, and are believed" in capsys.readouterr().out
    faults = rewritten(trained, compacted(3, versions=8)).faults
    assert faults == [
        "group 3: payloads of siblings [0, 1] are compacted away, though it may still be asked for"
    ]
    assert "version_sum: 5 was left" in rewritten(trained, compacted(1, versions=5)).faults[0]


def test_what_is_settled_is_not_held(trained: Run) -> None:
    assert folded(trained).groups.live.keys() == {3, 4}


def test_faults_beyond_those_that_are_kept_are_counted(
    trained: Run, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.runs.books.MOST_KEPT", 2)
    faults = [Superseded(3.0, "actor", 70, 0, "superseded") for _ in range(30)]
    trained.append(*faults)
    assert cli.main(["audit", str(trained.path)]) == 1
    assert "... and 28 more" in capsys.readouterr().out


def test_a_record_that_is_none_is_a_fault_and_the_rest_is_read(trained: Run) -> None:
    log = trained.path / FILE_NAME
    data = log.read_bytes()
    at = data.rfind(b"StepsCommitted") - len(b"\x84\xa4type\xae") - FRAME.size
    number = FRAME.unpack_from(data, at)[2]
    log.write_bytes(data[:at] + framed(b"\x81\xa4type\xa4Nope", number))
    (fault,) = folded(trained).faults
    assert fault.startswith(f"record {number}: it cannot be decoded: Invalid value 'Nope'")


def test_the_reader_shares_no_code_with_what_it_reads() -> None:
    """Beside the import contract, which cannot see what is imported while it runs."""
    names = {"replay", "actors", "learner", "weight_sync", "retrieval_server"}
    code = (
        "import sys, scripts.runs.books\n"
        f"print({names!r} & {{name.partition('.')[0] for name in sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("config", ["[" * 200_000, "a: [", "seed: much", "a: &b [*b]"])
def test_a_configuration_that_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    """However deep it is nested."""
    with EventLog.create(tmp_path / FILE_NAME) as log:
        log.append([RunStarted(1.0, 0, config)])
        log.sync()
    assert cli.main(["audit", str(tmp_path)]) == 2
    assert "the configuration on record cannot be read: " in capsys.readouterr().err
