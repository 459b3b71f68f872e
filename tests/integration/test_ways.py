"""Each environment, and each part of the reward, in a run of real processes: short, but whole."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from configs.runtime.process import REPOSITORY
from replay.codec import decode_trajectory
from replay.log.event_log import read
from replay.log.records import Delivered
from replay.trajectory import Trajectory
from tests.integration.conftest import Run
from tests.integration.spelt import Task
from tests.retrieval_server.encoders import make_encoder

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.soak("environments")]
SHORT = (
    *("learner.total_steps=2", "learner.eval_every=2", "learner.checkpoint_every=2"),
    *("learner.warmup_steps=0", "replay.groups_per_step=2", "questions.eval_limit=2"),
)
Play = Callable[..., list[Trajectory]]


class Judge(ThreadingHTTPServer):
    """An OpenAI-compatible server that says yes to every other question, beginning with the first;
    each third one fails when it is first asked, and none fails again, whoever else asks."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Verdict)
        self.asked: list[str] = []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def verdict(self, question: str) -> str | None:
        """What is said; None: it fails."""
        with self.lock:
            fails = question not in self.asked and len(self.asked) % 3 == 2
            if question not in self.asked:
                self.asked.append(question)
            return None if fails else ("no", "yes")[self.asked.index(question) % 2 == 0]


class _Verdict(BaseHTTPRequestHandler):
    server: Judge
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = self.server.verdict(body["messages"][-1]["content"])
        message = {"role": "assistant", "content": said}
        reply = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
        self.send_response(503 if said is None else 200)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def judge() -> Iterator[Judge]:
    with Judge() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def play(
    begin: Callable[[Path, list[str]], Run],
    bpe_task: Task,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Play:
    """play(*overrides): the trajectories that two steps were trained on."""
    monkeypatch.setenv(
        "PYTHONPATH", str(REPOSITORY)
    )  # a user's own code, as a user would have it found

    def start(*overrides: str) -> list[Trajectory]:
        run_dir = tmp_path / "run"
        asked = [f"run_dir={run_dir}", *bpe_task.overrides, *SHORT, *overrides]
        run = begin(run_dir, [str(bpe_task.config), *asked])
        assert run.wait(400) == 0, "".join(run.lines) + run.logs()
        assert run.leftovers(5.0) == []
        summary = json.loads((run_dir / "summary.json").read_text())
        assert (summary["status"], summary["steps"]) == ("completed", 2)
        assert summary["token_mismatches"] == 0
        records = read(run_dir / "events.log")
        delivered = [each for each in records if isinstance(each, Delivered)]
        rollouts = [decode_trajectory(each.payload) for each in delivered]
        assert {each.kind for each in rollouts} == {"train", "eval"}
        for each in rollouts:
            assert each.kind == "train" or set(each.reward_parts) == {"em", "f1", "substring"}
        return [each for each in rollouts if each.kind == "train"]

    return start


def parts_of(rollouts: list[Trajectory]) -> set[str]:
    """The names that every rollout's parts have; every one was scored."""
    assert all(each.reward is not None for each in rollouts)
    (names,) = {frozenset(each.reward_parts) for each in rollouts}
    return set(names)


@pytest.mark.timeout(900)
def test_without_search_by_the_parts_of_an_answer(play: Play) -> None:
    weights = ("substring", "f1", "format", "avoidance", "search_cost")
    rollouts = play("environment.name=no_search", *(f"rewards.weights.{w}=0.25" for w in weights))
    assert parts_of(rollouts) == {"em", *weights}
    assert not any(turn.searches for each in rollouts for turn in each.turns)
    assert {len(each.turns) for each in rollouts} == {1}


@pytest.mark.timeout(900)
def test_with_passages_in_the_prompt_by_meaning_and_by_a_users_own_reward(
    play: Play, tmp_path: Path
) -> None:
    encoder = make_encoder(tmp_path / "encoder")
    rollouts = play(
        *("environment.name=rag", "rewards.weights.retrieval_hit=0.1"),
        *("rewards.weights.similarity=0.5", f"rewards.similarity.model={encoder}"),
        *("rewards.weights.custom=0.1", "rewards.custom=tests.actors.judges:evidence"),
    )
    assert parts_of(rollouts) == {"em", "retrieval_hit", "similarity", "custom"}
    searches = [each.turns[0].searches for each in rollouts]
    assert all(found and found[0].passage_ids for found in searches)
    assert {len(each.turns) for each in rollouts} == {1}


@pytest.mark.timeout(900)
def test_with_tools_a_budget_and_a_forced_answer_by_a_judge(play: Play, judge: Judge) -> None:
    rollouts = play(
        *(
            "environment.tools=['tests.actors.calculator:calculator']",
            "environment.tell_budget=true",
        ),
        *("environment.queries_per_turn=2", "environment.force_answer=true"),
        *("rewards.weights.judge=1", f"rewards.judge.url={judge.url}", "rewards.judge.model=any"),
    )
    assert parts_of(rollouts) == {"em", "judge"} and judge.asked
    answered = [each for each in rollouts if each.answer]
    assert {each.reward_parts["judge"] for each in answered} <= {0.0, 1.0}
    assert all(each.reward_parts["judge"] == 0.0 for each in rollouts if each.answer is None)


@pytest.mark.timeout(900)
def test_in_a_users_own_environment_by_search_r1s_score(play: Play, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.jsonl"
    rows = [{"question": f"number {n}?", "answers": [str(n)]} for n in range(8)]
    numbers.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rollouts = play(
        *("environment.name=tests.actors.guessing:Guessing", "rewards.mode=search_r1"),
        *("rewards.search_r1.version=v0.3", f"questions.train={numbers}"),
        f"questions.eval={numbers}",
    )
    assert {each.reward for each in rollouts} <= {0.0, 0.1, 0.2, 0.8, 1.0}
    hints = [turn for each in rollouts for turn in each.turns[:-1]]
    assert all(len(turn.observation_tokens) and not turn.searches for turn in hints)
