"""A warm start as its user starts it: what it leaves on one rank and on two, interrupted, killed
and begun again, and what it says of bad input.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.runtime.process import Exit, socket_dir
from learner import checkpoint
from scripts import cli
from tests.scripts.starting import DEADLINE_S, Started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
THINGS = ("mayor", "information", "answer", "action", "previous", "search")
SEARCH, ANSWER = "<search> mayor of bore </search>", "<answer> kelu </answer>"
STEPS, EVERY, BEGUN = 30, 5, "held-out loss before the first step"
CONFIG = """\
model: {{path: {model}, dtype: float32, max_model_len: 400}}
questions: {{prompt: '{{question}}', chat_template: false}}
learner: {{lr: 1e-3, lr_schedule: linear, warmup_steps: 2, eval_every: {every},
          checkpoint_every: {every}, micro_batch_tokens: 300}}
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Started]]:
    """start(*words): the command with these; whatever is left of it is killed afterwards."""
    started: list[Started] = []

    def begin(*words: str, by: tuple[str, ...] = ()) -> Started:
        command = [*by, sys.executable, "-m", "scripts.cli", "warm-start", *words]
        started.append(Started(command, tmp_path_factory.mktemp("said") / "log"))
        return started[-1]

    yield begin
    for each in started:
        each.end()


@pytest.fixture(scope="module")
def given(
    make_tiny_model: Callable[[Path, Any], Path],
    bpe_tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    """A command line: six demonstrations, a small model, as many epochs as make STEPS."""
    folder = tmp_path_factory.mktemp("given")
    model = make_tiny_model(folder / "model", bpe_tokenizer)
    passage = {"id": "1", "title": "bore", "text": "the mayor of bore is kelu ."}
    turns = [{"action": SEARCH, "passages": [passage]}, {"action": ANSWER}]
    rows = [{"question": f"what is the {thing}", "turns": turns} for thing in THINGS]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "c.yaml").write_text(CONFIG.format(model=model, every=EVERY))
    options = ["--rows", "4", "--epochs", "24", "--held-out", "0.2"]
    return [str(folder / "c.yaml"), "--demonstrations", str(folder / "d.jsonl"), *options]


@pytest.fixture(scope="module")
def undisturbed(
    start: Callable[..., Started], given: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[Path, Started]]:
    """undisturbed(ranks): the folder that as many ranks leave, and what they said."""
    made: dict[int, tuple[Path, Started]] = {}

    def make(ranks: int) -> tuple[Path, Started]:
        if ranks not in made:
            out = tmp_path_factory.mktemp("undisturbed") / "out"
            run = start(*given, "--out", str(out), f"learner.ranks={ranks}")
            assert run.ended() == 0, run.said
            made[ranks] = out, run
        return made[ranks]

    return make


def weights(folder: Path) -> torch.Tensor:
    """Every weight of a model's folder, in one row."""
    found = load_file(folder / "model.safetensors")
    return torch.cat([found[name].flatten() for name in sorted(found)])


def scalars(out: Path, name: str) -> list[tuple[int, float]]:
    """A gauge by step, as TensorBoard shows it."""
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def same(one: Path, other: Path) -> None:
    """The same was learnt, bit for bit: weights, averages, optimiser, losses, each step once."""
    for name in ("model", "checkpoints/best/model", f"checkpoints/step-{STEPS}/ema"):
        assert torch.equal(weights(one / name), weights(other / name)), name
    states = [out / "checkpoints" / f"step-{STEPS}" / "state" for out in (one, other)]
    for path in states[0].iterdir():
        ours, theirs = load_file(path), load_file(states[1] / path.name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), path.name
    assert (one / "losses.json").read_text() == (other / "losses.json").read_text()
    for name in ("learner/loss", "learner/held_out_loss"):
        assert scalars(one, name) == scalars(other, name)


def test_it_leaves_a_model_that_does_as_demonstrated(
    undisturbed: Callable[[int], tuple[Path, Started]],
) -> None:
    out, run = undisturbed(1)
    losses = {int(step): v for step, v in json.loads((out / "losses.json").read_text()).items()}
    assert list(losses) == list(range(0, STEPS + 1, EVERY)) and losses[STEPS] < losses[0] / 10
    assert f"{BEGUN}: {losses[0]:.4f}" in run.said
    (first, *_, last) = scalars(out, "learner/loss")
    assert (first[0], last[0]) == (1, STEPS) and last[1] < first[1] / 10
    best = min(list(losses)[1:], key=losses.__getitem__)
    assert f"the model of step {best}, the best, with" in run.said
    assert f"model.path={out / 'model'}" in run.said.splitlines()
    assert torch.equal(weights(out / "model"), weights(out / "checkpoints" / "best" / "model"))
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    asked = tokenizer(f"what is the {THINGS[0]}", return_tensors="pt")
    told = model.generate(**asked, max_new_tokens=40, do_sample=False)[0]
    assert tokenizer.decode(told[asked.input_ids.numel() :]).startswith(SEARCH)


@pytest.mark.soak("commands")
def test_two_ranks_learn_what_one_does(
    undisturbed: Callable[[int], tuple[Path, Started]], given: list[str]
) -> None:
    (one, _), (two, _) = undisturbed(1), undisturbed(2)
    begun = weights(Path(given[0]).parent / "model")
    models = [weights(out / "checkpoints" / f"step-{STEPS}" / "model") for out in (one, two)]
    assert float((models[1] - models[0]).norm() / (models[0] - begun).norm()) < 1e-3
    of_ranks = [[loss for _, loss in scalars(out, "learner/loss")] for out in (one, two)]
    assert of_ranks[1] == pytest.approx(of_ranks[0], rel=1e-3, abs=1e-5)
    assert not socket_dir(str(two)).exists()


@pytest.mark.parametrize(
    ("ranks", "ends"),
    [
        # What it says comes before the checkpoint of that step: it is killed while it saves.
        (1, [("step 10/", signal.SIGKILL), ("step 15/", signal.SIGTERM)]),
        pytest.param(2, [("step 10/", signal.SIGINT)], marks=pytest.mark.soak("commands")),
    ],
)
def test_however_it_is_ended_it_goes_on_to_the_same(
    start: Callable[..., Started],
    given: list[str],
    undisturbed: Callable[[int], tuple[Path, Started]],
    tmp_path: Path,
    ranks: int,
    ends: list[tuple[str, signal.Signals]],
) -> None:
    out = tmp_path / "out"
    words = [*given, "--out", str(out), f"learner.ranks={ranks}"]
    for reached, number in ends:
        run = start(*words)
        run.until(lambda run=run, reached=reached: reached in run.said)
        os.killpg(run.process.pid, number)  # as Ctrl-C does
        code = run.ended()
        assert not (out / "model").exists()
        if number == signal.SIGKILL:
            assert code == -signal.SIGKILL
        else:
            assert code == Exit.INTERRUPTED, run.said
            was_saved(out, number, run)
    again = start(*words)
    assert again.ended() == 0, again.said
    assert BEGUN not in again.said and not list((out / "checkpoints").glob(".*"))
    same(out, undisturbed(ranks)[0])


def was_saved(out: Path, number: signal.Signals, run: Started) -> None:
    """The step that was finished, as it says; and its ranks have cleared up."""
    found = checkpoint.newest(out)
    assert found is not None and 10 <= found.manifest.step < STEPS
    said = f"{number.name}: saved after step {found.manifest.step}; the same command, with --out"
    assert f"{said} {out}, goes on from there" in run.said and "Traceback" not in run.said
    assert not socket_dir(str(out)).exists()


@pytest.mark.soak("commands")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_while_ranks_are_starting_it_leaves_nobody(
    start: Callable[..., Started], given: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    run = start(*given, "--out", str(tmp_path / "out"), "learner.ranks=2")
    run.until(lambda: run.others)
    os.killpg(run.process.pid, number)
    expected = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGKILL: -signal.SIGKILL}
    code = run.ended()
    shutil.rmtree(socket_dir(str(tmp_path / "out")), ignore_errors=True)  # a killed one leaves it
    assert code == expected[number], run.said
    assert checkpoint.newest(tmp_path / "out") is None and "Traceback" not in run.said


@pytest.mark.soak("commands")
def test_interrupted_while_it_measures_what_is_held_out_it_takes_no_step(
    start: Callable[..., Started], given: list[str], tmp_path: Path
) -> None:
    (row,) = Path(given[2]).read_text().splitlines()[:1]
    rows = [row.replace("what is", f"what is {number}") + "\n" for number in range(4000)]
    (tmp_path / "d.jsonl").write_text("".join(rows))
    out, held_out = tmp_path / "out", ("--held-out", "0.95", "learner.ranks=2")
    words = (given[0], "--demonstrations", str(tmp_path / "d.jsonl"), "--out", str(out))
    run = start(*words, *held_out)
    run.until(lambda: "measuring the loss of 3800 held out" in run.said)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.ended() == Exit.INTERRUPTED, run.said
    assert "interrupted before it took a step" in run.said
    assert BEGUN not in run.said and "Traceback" not in run.said
    assert checkpoint.newest(out) is None and not (out / "losses.json").exists()


def test_a_folder_that_cannot_be_written_is_bad_input(
    start: Callable[..., Started], given: list[str], tmp_path: Path
) -> None:
    (tmp_path / "out" / "curriculum.json.draft").mkdir(parents=True)  # not even root can write it
    run = start(*given, "--out", str(tmp_path / "out"))
    assert run.ended() == Exit.BAD_INPUT, run.said
    said = f"forage: --out '{tmp_path}/out': Is a directory: name another folder"
    assert run.said.splitlines()[-1] == said and "Traceback" not in run.said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["curriculum.json.draft"]


@pytest.mark.soak("commands")
def test_a_rank_that_ends_before_it_has_joined_is_named(
    start: Callable[..., Started], given: list[str], tmp_path: Path
) -> None:
    words = ("--out", str(tmp_path / "out"), "learner.ranks=2", "learner.step_deadline_s=3600")
    run = start(*given, *words)
    run.until(lambda: run.others)
    os.kill(run.others[0], signal.SIGKILL)
    assert run.ended() == Exit.FAILED, run.said
    assert "rank 1 of the learner ended with exit code -9 before it had joined" in run.said


@pytest.mark.soak("commands")
def test_it_outlives_the_shell_that_started_it(
    start: Callable[..., Started], given: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [*given, "--out", str(out), "--epochs", "1"]
    begun = f'"$@" & until [ -e "{out}/curriculum.json" ]; do sleep 0.1; done'
    run = start(*words, by=("sh", "-c", begun, "sh"))
    assert run.process.wait(DEADLINE_S) == 0 and run.others and not (out / "model").exists()
    assert run.ended(DEADLINE_S) == 0
    assert f"model.path={tmp_path}/out/model" in run.said, run.said


NO_QUESTION = '{"prompt": "who", "turns": []}\n'


@pytest.mark.parametrize(
    ("text", "words", "named"),
    [
        (
            NO_QUESTION,
            (),
            ["d.jsonl:1: ", "missing required field `question`", 'write {"question"'],
        ),
        ("", (), ["d.jsonl'", "it is empty: write one demonstration a line"]),
        (None, (), ["d.jsonl'", "no file there: name a JSONL file"]),
        (
            NO_QUESTION,
            ("model.path=/none",),
            ["model.path = '/none'", "name a Hugging Face folder"],
        ),
    ],
)
def test_bad_input_is_named_with_its_remedy_before_anything_is_made(
    given: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    words: tuple[str, ...],
    named: list[str],
) -> None:
    if text is not None:
        (tmp_path / "d.jsonl").write_text(text)
    options = ("--demonstrations", str(tmp_path / "d.jsonl"), "--out", str(tmp_path / "out"))
    assert cli.main(["warm-start", given[0], *options, *words]) == Exit.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("forage: ") and all(each in line for each in named), line
    assert not (tmp_path / "out").exists()
