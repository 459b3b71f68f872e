"""The pages' server: behind its key alone, with answers that are text, and bad questions named."""

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from starlette.testclient import TestClient

from configs.load import ConfigError
from learner.health.sentinels import FILE_NAME, Noted
from replay.codec import decode_trajectory
from replay.log.event_log import EventLog
from replay.log.records import Delivered, StepsCommitted
from replay.trajectory import Search, TokenSequence
from scripts.command.terminal import clean
from scripts.view.answers import overview, rollout
from scripts.view.index import Index
from scripts.view.server import Following, application, listener
from tests.scripts.conftest import RecordedRun
from tests.scripts.view.conftest import HOSTILE, KEPT, delivery, keep_tokens

KEY = "a-key"


@pytest.fixture
def asked(index_of: Callable[..., Index], hostile_run: Path) -> Iterator[Callable[..., Any]]:
    """asked(path, …): the answer of a server of the hostile run."""
    index = index_of(hostile_run)
    with TestClient(application(index, Following(index), KEY)) as client:
        yield lambda path, **given: client.get(f"/{KEY}/{path}", params=given)


@pytest.mark.parametrize("path", ["", "app.js", "api/overview", f"{KEY}x/", "other/app.js"])
def test_who_does_not_know_the_key_is_answered_nothing(
    index_of: Callable[..., Index], hostile_run: Path, path: str
) -> None:
    index = index_of(hostile_run)
    with TestClient(application(index, Following(index), KEY)) as client:
        assert client.get(f"/{path}").status_code == 404
        assert client.post(f"/{KEY}/api/overview").status_code == 405


def test_pages_run_nothing_but_their_own_script(asked: Callable[..., Any]) -> None:
    for name, kind in (("", "text/html"), ("app.js", "text/javascript"), ("app.css", "text/css")):
        answer = asked(name)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http" not in asked("").text.replace("http-equiv", "")
    assert asked("../server.py").status_code == 404


def test_what_strangers_wrote_is_answered_as_json_text(asked: Callable[..., Any]) -> None:
    found = asked("api/rollouts", text="<script>", kind="train", most=2)
    assert found.headers["content-type"] == "application/json"
    assert found.json()["count"] == 3 and len(found.json()["rows"]) == 2
    row = found.json()["rows"][0]
    detail = asked("api/rollout", run=0, number=row["number"]).json()
    (sequence,) = detail["sequences"]
    (turn,) = sequence["turns"]
    assert sequence["name"] == KEPT and turn["searches"][0]["query"] == KEPT
    assert turn["searches"][0]["passages"] == [KEPT]
    assert "".join(turn["tokens"]) == KEPT
    assert turn["observation"] == [{"title": "", "id": "", "text": KEPT}]
    assert turn["logprobs"] == [-0.5] * len(turn["tokens"]) and len(turn["versions"]) > 3
    run = asked("api/overview").json()["runs"][0]
    assert run["evaluations"][0]["em_by_set"] == {KEPT: 0.25}
    assert run["name"] == "<b>run" and run["records"] == 8 and HOSTILE not in json.dumps(run)


def texts(found: Any) -> list[str]:
    """All texts of a JSON value, names among them."""
    if isinstance(found, dict):
        return [*found, *(text for each in found.values() for text in texts(each))]
    if isinstance(found, list):
        return [text for each in found for text in texts(each)]
    return [found] if isinstance(found, str) else []


@pytest.mark.parametrize(
    "path", ["overview", "health", "timeline", "waits", "rollouts", "rollout?number=4", "rollout"]
)
def test_no_answer_has_what_is_obeyed_or_hidden(asked: Callable[..., Any], path: str) -> None:
    name, _, number = path.partition("?number=")
    answer = asked(f"api/{name}", number=number or "9")
    found = texts(answer.json())
    assert found and [each for each in found if each != clean(each)] == []
    assert (KEPT in found) == (path in ("overview", "rollouts", "rollout?number=4"))


def test_rollouts_are_asked_for_by_searches_and_staleness(
    index_of: Callable[..., Index], recorded_run: RecordedRun, hostile_run: Path
) -> None:
    recorded_run.train(0)
    index = index_of(recorded_run.path, hostile_run)
    with TestClient(application(index, Following(index), KEY)) as client:

        def count(**given: str) -> int:
            answer = client.get(f"/{KEY}/api/rollouts", params=given).json()
            assert answer["count"] == len(answer["rows"])
            return int(answer["count"])

        assert count(staleness_from="0") == count(staleness_to="0", run="0") == 4
        assert count(staleness_from="1") == count(staleness_from="0", run="1") == 0
        assert count(searches_from="1", searches_to="1", run="1") == 3
        assert count(searches_from="1.5") == count(searches_to="0", run="1") == 0


@pytest.mark.parametrize(
    ("path", "given", "complaint"),
    [
        ("rollouts", {"most": "many"}, "most = 'many': give a whole number of at most"),
        ("rollouts", {"steps": "3,nan"}, "steps = 'nan': give steps and spans of steps, such as"),
        ("rollouts", {"steps": "9" * 5000}, "steps = '999"),
        ("rollouts", {"steps": "1," * 2000}, "steps: more than 1000 spans: ask for fewer"),
        ("rollouts", {"begin": "9" * 5000}, "begin = '999"),
        *(
            ("rollouts", {name: "99999999999999999999"}, f"{name} = '99999999999999999999': give")
            for name in ("run", "group", "begin", "most")
        ),
        ("rollout", {"number": "-99999999999999999999"}, "number = '-9"),
        ("rollouts", {"which": "all"}, "which = 'all': choose one of repeated, empty, malformed, "),
        ("timeline", {"run": "1e9"}, "run = '1e9': give a whole number"),
        ("timeline", {"run": "7"}, "run 7: there is no such run"),
        ("timeline", {"time_from": "nan"}, "time: cannot convert float NaN"),
        ("rollout", {"run": "7"}, "run 7: there is no such run"),
        ("rollout", {"run": "-1"}, "run -1: there is no such run"),
        ("rollout", {"run": "0", "number": "99"}, "record 99: there is no such rollout"),
    ],
)
def test_bad_questions_are_named(
    asked: Callable[..., Any], path: str, given: dict[str, str], complaint: str
) -> None:
    answer = asked(f"api/{path}", **given)
    assert answer.status_code == 400 and complaint in answer.json()["error"]


def test_curves_and_sentinels_are_of_all_runs(
    index_of: Callable[..., Index], recorded_run: RecordedRun, hostile_run: Path
) -> None:
    recorded_run.train(0)
    recorded_run.report(1, {"actor/reward": 0.5})
    fired = (3, 10, 11, 9, 10)  # and again after it went back
    steps = [*range(12), 9, 10]
    notes = [Noted(n, {"learner/current_ess": 0.5}, ("ess",) * (n in fired)) for n in steps]
    lines = [json.dumps({"step": n.step, "gauges": n.gauges, "fired": n.fired}) for n in notes]
    (recorded_run.path / FILE_NAME).write_text("\n".join([*lines, '{"torn']))
    index = index_of(recorded_run.path, hostile_run)
    with TestClient(application(index, Following(index), KEY)) as client:
        told = client.post(f"/{KEY}/api/curves", json=["actor/reward", "none"]).json()
        rules = client.get(f"/{KEY}/api/health").json()["rules"]
    assert told["actor/reward"] == [{"steps": [1], "values": [0.5]}, {"steps": [], "values": []}]
    (ess,) = [rule for rule in rules if rule["name"] == "ess"]
    assert ess["runs"][0]["fired"] == [[3, 3], [9, 11]] and ess["runs"][0]["bound"] == 0.8
    assert ess["runs"][0]["steps"] == list(range(12)) and ess["runs"][1]["fired"] == []


def test_gauges_are_asked_for_by_any_name(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    names = [letter * 3900 for letter in "éèàùêâûî"] + ["a,b", 'c"\n']
    recorded_run.report(1, dict.fromkeys(names, 0.5))
    index = index_of(recorded_run.path)
    with TestClient(application(index, Following(index), KEY)) as client:
        known = client.get(f"/{KEY}/api/overview").json()["gauges"]
        assert {*names} <= {*known}
        told = client.post(f"/{KEY}/api/curves", json=known).json()
        assert client.get(f"/{KEY}/api/curves").status_code == 405
        assert client.post("/api/curves", json=known).status_code == 404
    assert told == {name: [{"steps": [1], "values": [0.5]}] for name in known}


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "curves: give a JSON list of at most 64 names of gauges"),
        (b'{"a": 1}', "curves: give a JSON list of at most 64 names"),
        (b"[1]", "curves: give a JSON list"),
        (b"[" * 100_000, "curves: give a JSON list"),
        (b'["\xff"]', "curves: give a JSON list"),
        (json.dumps(["a"] * 65).encode(), "curves: give a JSON list of at most 64 names"),
        (b'["' + b"a" * 1_000_000 + b'"]', "curves: more than 1000000 bytes"),
    ],
)
def test_what_is_no_list_of_gauges_is_named(
    index_of: Callable[..., Index], hostile_run: Path, body: bytes, complaint: str
) -> None:
    index = index_of(hostile_run)
    with TestClient(application(index, Following(index), KEY)) as client:
        answer = client.post(f"/{KEY}/api/curves", content=body)
        in_parts = client.post(f"/{KEY}/api/curves", content=iter([body[:9], body[9:]]))
    assert answer.status_code == 400 and complaint in answer.json()["error"]
    assert in_parts.json() == answer.json()


def test_a_time_is_cut_to_that_of_the_run(asked: Callable[..., Any]) -> None:
    whole = asked("api/timeline").json()
    assert (whole["first"], whole["last"], whole["from"]) == (1.0, 2.0, 1.0)
    assert whole["bins"] == 800 and len(whole["lanes"][0]["states"][0]["levels"]) == 800
    cut = asked("api/timeline", time_from="-inf", time_to="1.5").json()
    assert cut["from"] == 1.0 and cut["width"] == pytest.approx(0.5 / 800)
    assert asked("api/rollouts", time_from="1.5", time_to="2.5").json()["count"] == 3
    assert asked("api/rollouts", time_to="1.5").json()["count"] == 0
    assert asked("api/rollouts", actor="actor").json()["count"] == 3


def test_of_a_megabyte_a_part_is_sent_and_what_is_left_out_is_told(
    index_of: Callable[..., Index], hostile_run: Path, bpe_tokenizer: Any, tmp_path: Path
) -> None:
    (folder := tmp_path / "long").mkdir()
    shutil.copy(hostile_run / "config.yaml", folder)
    said = np.array(bpe_tokenizer.encode("kelu vora\n", add_special_tokens=False), np.int32)
    ids, megabyte = np.tile(said, 200_000 // len(said)), "abcdefghi\n" * 100_000
    (_, delivered) = delivery(1, "kelu", bpe_tokenizer)
    assert isinstance(delivered, Delivered)
    (only,) = decode_trajectory(delivered.payload).sequences
    turn = msgspec.structs.replace(
        only.turns[0],
        action_tokens=ids,
        behaviour_logprobs=np.full(len(ids), -0.5, np.float32),
        policy_versions=np.zeros(len(ids), np.int32),
        observation_tokens=ids,
        searches=(Search(megabyte, (), 0.1, "ok"),),
    )
    sequences = (TokenSequence(only.prompt_tokens, (turn,), ""),)
    with EventLog.create(folder / "events.log") as log:
        log.append(delivery(1, "kelu", bpe_tokenizer, sequences=sequences))
        log.sync()
    with TestClient(application(index := index_of(folder), Following(index), KEY)) as client:
        answer = client.get(f"/{KEY}/api/rollout", params={"number": "1"})
    assert len(answer.content) < 1_500_000
    told = answer.json()["sequences"][0]["turns"][0]
    (observed,) = told["observation"]
    shown = len(told["tokens"])
    assert shown == 20_000 == len(told["logprobs"]) == len(told["versions"])
    assert told["left"] == len(ids) - 20_000
    assert observed["text"].endswith(f"… ({len(ids) - 100_000} more tokens)")
    assert len(observed["text"]) < 100_100
    assert told["searches"][0]["query"] == megabyte[:100_000] + "… (900000 more characters)"


def test_passages_are_told_apart_with_their_titles(
    index_of: Callable[..., Index], hostile_run: Path, bpe_tokenizer: Any, tmp_path: Path
) -> None:
    (folder := tmp_path / "titled").mkdir()
    shutil.copy(hostile_run / "config.yaml", folder)
    text = '\n\n<information>Doc 1(Title: "<b>(x) kelu") vora</information>\n\n'
    with EventLog.create(folder / "events.log") as log:
        log.append(delivery(9, text, bpe_tokenizer))
        log.sync()
    index = index_of(folder)
    ((number,),) = index.rows("SELECT number FROM rollouts WHERE group_id = 9")
    (turn,) = rollout(index, 0, number)["sequences"][0]["turns"]
    before, passage, after = turn["observation"]
    assert passage == {"title": "<b>(x) kelu", "id": clean(text), "text": "vora"}
    assert before["title"] == after["title"] == "" and "</information>" in after["text"]


def test_of_many_events_the_newest_are_told_and_how_many_there_were(
    index_of: Callable[..., Index], recorded_run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.view.answers.MOST_EVENTS", 3)
    recorded_run.append(*(StepsCommitted(1.0, 1, step) for step in range(9)))
    index = index_of(recorded_run.path)
    (run,) = overview(index)["runs"]
    assert [each["said"][-1] for each in run["events"]] == ["8", "7", "6"]
    assert run["happened"] == len(index.rows("SELECT 1 FROM events WHERE kind != 'group'")) > 9


def test_a_rollback_is_an_event(index_of: Callable[..., Index], recorded_run: RecordedRun) -> None:
    recorded_run.train(0)
    back = {"learner/rollbacks": 1.0, "learner/rolled_back_to": 0.0, "learner/rate_scale": 0.5}
    recorded_run.report(1, back)
    index = index_of(recorded_run.path)
    with TestClient(application(index, Following(index), KEY)) as client:
        (run,) = client.get(f"/{KEY}/api/overview").json()["runs"]
    (event,) = [each for each in run["events"] if each["kind"] == "rollback"]
    assert event["step"] == 1 and event["said"].startswith(
        "rollback 1 at step 1: weights of step 0"
    )


def test_a_rollout_without_payload_or_tokenizer_says_so(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    recorded_run.train(0)
    opened, delivered = delivery(99)
    gone = delivered.__class__(**{f: getattr(delivered, f) for f in delivered.__struct_fields__} | {
        "payload": b""})  # fmt: skip
    recorded_run.append(opened, gone)
    index = index_of(recorded_run.path)
    with TestClient(application(index, Following(index), KEY)) as client:
        rows = client.get(f"/{KEY}/api/rollouts", params={"descending": "0"}).json()["rows"]
        shown = [
            client.get(f"/{KEY}/api/rollout", params={"run": 0, "number": row["number"]}).json()
            for row in (rows[0], rows[-1])
        ]
    assert "numbers of tokens are shown" in shown[0]["lacks"]
    assert shown[0]["sequences"][0]["turns"][0]["tokens"][0].strip().isdigit()
    assert shown[1] == {"gone": "its tokens were compacted away (replay.keep, forage compact)"}


def test_a_rollout_has_what_the_learner_made_of_its_tokens(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    recorded_run.deliver_all(sequences=2)
    keep_tokens(recorded_run.path, recorded_run.sample(0))
    recorded_run.train(1)
    index = index_of(recorded_run.path)
    rows = index.rows("SELECT number, step FROM rollouts ORDER BY step, group_id, sibling")
    found = [rollout(index, 0, number) for number, step in rows if step == 1]
    turns = [turn for each in found for sequence in each["sequences"] for turn in sequence["turns"]]
    assert len(turns) == 16 and not any(each["unknown"] for each in found)
    for number, turn in enumerate(turns):
        at = [4 * number + place for place in range(4)]
        values = [float(f"{-each / 64:.4g}") for each in at]
        made = turn["learnt"]
        for name in ("current", "proximal", "weight", "advantage"):
            assert made[name] == values, name
        assert made["ratio"] == [v if n % 3 else None for n, v in zip(at, values, strict=True)]
        assert made["fate"] == [0 if n % 3 else 3 for n in at]
    (other,) = [number for number, step in rows if step == 2][:1]
    said = rollout(index, 0, other)
    assert said["unknown"] == "there is no tokens/step-2.safetensors (view.keep_steps)"
    assert "learnt" not in said["sequences"][0]["turns"][0]


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def told(dtype: str, shape: list[int], end: float, **metadata: str) -> bytes:
    sequences = {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}
    known = {"__metadata__": {"format": "1"} | metadata}
    return header(json.dumps(known | ({"sequences": sequences} if dtype else {})))


def with_numbers(name: str, column: slice | int, number: int) -> Callable[[Path], None]:
    """Other numbers in a tensor, or in one column of it."""

    def change(path: Path) -> None:
        tensors = load_file(path)
        tensors[name][..., column] = number
        save_file(tensors, path, {"format": "1"})

    return change


WHOLE = slice(None)
INSTEAD: list[tuple[bytes, str]] = [
    (b"", "its header is none"),
    (b"\xff" * 8, "its header has 18446744073709551615 bytes"),
    (header("[" * 60_000), "its header is none"),
    (header("{}"), "its format is none, which is not 1"),
    (told("", [], 0, format=HOSTILE), "its format is <script>"),
    (told("", [], 0), "it has no 'sequences'"),
    (told("I64", [9, 4], 8e30), "its header is none"),
    (told("I64", [999_999_999, 4], 9), "'sequences' is not whole"),
    (told(HOSTILE * 9, [], 0), "'sequences' is <script>"),
]
CHANGED: list[tuple[Callable[[Path], object], str]] = [
    *((partial(Path.write_bytes, data=content), cause) for content, cause in INSTEAD),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "' is not whole"),
    (with_numbers("fate", WHOLE, 250), "the fate of a token is none"),
    (with_numbers("sequences", 3, 7), "its sequences have 28 tokens, its values [32]"),
    (with_numbers("sequences", 3, -8), "its sequences have -32 tokens"),
    (with_numbers("sequences", 0, 9), "it lacks this rollout"),
    (with_numbers("sequences", 2, 9), "it has other tokens than this rollout"),
    (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    (lambda path: (path.unlink(), os.mkfifo(path)), "it is no file"),
]


def test_tokens_of_strangers_are_shown_or_named(
    index_of: Callable[..., Index], recorded_run: RecordedRun
) -> None:
    path = keep_tokens(recorded_run.path, recorded_run.train(0))
    index, content = index_of(recorded_run.path), path.read_bytes()
    (number,) = index.rows("SELECT number FROM rollouts WHERE step = 1")[0]
    for case, (change, cause) in enumerate(CHANGED):
        path.rename(path.with_suffix(f".{case}"))  # a folder, or a pipe
        path.write_bytes(content)
        change(path)
        said = rollout(index, 0, number)
        assert cause in said["unknown"] and "tokens/step-1.safetensors" in said["unknown"]
        assert said["unknown"].isprintable() and len(said["unknown"]) <= 300
        assert "learnt" not in said["sequences"][0]["turns"][0]


def test_a_live_page_hears_of_news_and_of_nothing_else(
    index_of: Callable[..., Index], recorded_run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.view.server.EVERY_S", 0.02)
    index = index_of(recorded_run.path)
    following = Following(index)
    following.start()
    try:
        asyncio.run(heard(following, recorded_run))
    finally:
        following.stop()


async def heard(following: Following, run: RecordedRun) -> None:
    from scripts.view.server import _news

    class Page:
        async def is_disconnected(self) -> bool:
            return False

    news = _news(Page(), following)  # type: ignore[arg-type]
    assert await anext(news) == 'data: {"version": 0, "going": true}\n\n'
    waiting = asyncio.ensure_future(anext(news))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    run.train(0)
    said = json.loads((await asyncio.wait_for(waiting, 10)).removeprefix("data: "))
    assert said == {"version": following.version, "going": True}
    run.log.close()  # its process has ended, and wrote nothing more
    said = json.loads((await asyncio.wait_for(anext(news), 10)).removeprefix("data: "))
    assert said["going"] is False
    summary = run.path / "summary.json"  # it comes after the last record
    summary.write_text('{"status": "finished"}')
    await asyncio.wait_for(anext(news), 10)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: cannot listen there .*in use.*free"):
            listener(port)
    with pytest.raises(ConfigError, match="--port 70000: give 1 to 65535, or"):
        listener(70000)
