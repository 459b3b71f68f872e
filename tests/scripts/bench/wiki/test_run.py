"""The wiki benchmark's pieces: in slices, gone on with, reported; then a tiny one for real."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError
from configs.runtime.process import REPOSITORY, Exit
from scripts.bench.harness import BenchError
from scripts.bench.wiki import bench as benching
from scripts.bench.wiki import measured as measuring
from scripts.bench.wiki import seed as seeding
from scripts.bench.wiki.bench import BenchWikiOptions, left_of, present, summary
from scripts.bench.wiki.measured import Measured, added, keep, measured_of
from scripts.bench.wiki.run import ENDING_S, FIRST_S, START_S, Slice, work
from scripts.bench.wiki.seed import METHODS, PIECES, SAMPLINGS, Seed
from scripts.bench.wiki.supervised import Schedule
from scripts.wiki.packages import WikiError
from scripts.wiki.pipeline import settings
from scripts.wiki.pipeline.commands import OutOfTime
from tests.scripts.bench.wiki.commands import STEPS, Commands, ems_of, folder_of, seed
from tests.scripts.wiki.pipeline.tiny import FEW, lengthened

ALL = 2 + 1 + 2 * 3 + 10  # start, training, three supervised measurements, evaluations


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine and a disk that will do."""
    monkeypatch.setattr(seeding, "check_run", lambda plan: None)
    monkeypatch.setattr(measuring, "reader", lambda model: str)  # their models are none


def told(options: BenchWikiOptions, seeds: list[Seed]) -> list[Measured]:
    """What they measured, also kept."""
    found = [measured_of(each, options.out, options.settings, {"cores": 2}) for each in seeds]
    for one, each in zip(found, seeds, strict=True):
        keep(one, options.out, each)
    return found


def whole(commands: Commands, minutes: float = 30.0) -> Slice:
    return Slice(minutes, commands, lambda: 0.0)


def test_a_slice_begins_nothing_towards_its_end_but_the_first() -> None:
    now, commands = [0.0], Commands()
    time_left = Slice(5.0, lambda words, *_: commands.asked.append([*words]), lambda: now[0])
    now[0] = 5 * 60.0 - ENDING_S - START_S
    time_left(["warm-start"], Path("log"))
    time_left(["evaluate"], Path("log"))
    now[0] += 1.0
    with pytest.raises(OutOfTime, match="forage train"):
        time_left(["train"], Path("log"))
    assert commands.asked == [["warm-start"], ["evaluate"]]
    late = Slice(5.0, lambda words, *_: commands.asked.append([*words]), lambda: now[0])
    now[0] += 5 * 60.0
    late(["train"], Path("log"))  # else nothing would ever be made
    assert commands.asked[-1] == ["train"]


def test_what_is_under_way_is_told_before_the_slice_ends_and_killed_at_its_end() -> None:
    now, seen = [0.0], list[tuple[bool, float]]()

    def forage(words: object, log: object, is_over: Callable[[], bool], patience_s: float) -> None:
        for now[0] in (0.0, 1800.0 - ENDING_S - 0.1, 1800.0 - ENDING_S):
            seen.append((is_over(), patience_s))

    Slice(30.0, forage, lambda: now[0])(["train"], Path("log"))
    assert seen == [(False, ENDING_S), (False, ENDING_S), (True, ENDING_S)]


def test_everything_is_made_once_and_in_an_order_that_can_be(tmp_path: Path) -> None:
    commands, one = Commands(), seed(tmp_path)
    assert one.left == list(PIECES)
    work([one], whole(commands), print)
    assert one.left == [] and len(commands.asked) == ALL
    assert commands.names[:3] == ["warm-start", "step-2", "train"]
    assert commands.names[-1] == "trained-sampled"
    again = Commands()
    work([one], whole(again), print)
    assert not again.asked


def test_slices_of_two_commands_each_come_to_the_same(tmp_path: Path) -> None:
    one, slices = seed(tmp_path), list[Commands]()
    while one.left:
        slices.append(Commands(ends_at=3))
        work([one], whole(slices[-1]), print)
    assert len(slices) > ALL // 2 and ems_of(one.learnt) == [0.5, 0.5, 0.5]
    assert one.seconds["training"] == 90.0 and one.seconds.keys() == {*PIECES}


def test_each_model_is_asked_under_its_environments(tmp_path: Path) -> None:
    commands, one = Commands(), seed(tmp_path)
    work([one], whole(commands), print)
    asked = {folder_of(w): w for w in commands.asked if w[0] == "evaluate"}
    of_trained, of_base = asked["trained-greedy"], asked["base-sampled"]
    at_once = asked["trained_at_once-greedy"]
    assert of_trained[-2:] == ["--environment", "search_r1"]
    assert at_once[-2:] == of_base[-2:] == ["no_search", "rag"]
    for words in (of_trained, at_once):
        assert words[1].endswith(f"checkpoints/step-{STEPS}") and "--config" not in words
    assert "--config" in of_base and of_base[of_base.index("--temperature") + 1] == "1.0"
    assert {each for each in asked if "actors.max_action_tokens=256" in asked[each]} == {
        f"{model}-{how}" for model in ("base", "trained_at_once") for how in SAMPLINGS
    }
    assert asked["supervised-greedy"][1].endswith("supervised/best")
    assert len(one.rows("rag_trained", "greedy")) == 4
    assert {row.environment for row in one.rows("no_search", "sampled").values()} == {"no_search"}


def test_more_questions_are_asked_of_what_is_trained_already(tmp_path: Path) -> None:
    work([seed(tmp_path)], whole(Commands()), print)
    more, commands = seed(tmp_path, questions=6), Commands()
    assert more.left == [piece for piece in PIECES if ", " in piece]
    work([more], whole(commands), print)
    assert len(commands.asked) == 10 and len(more.rows("start", "greedy")) == 6
    assert seed(tmp_path, questions=3).left == []


def test_a_model_that_is_trained_anew_is_asked_anew(tmp_path: Path) -> None:
    one = seed(tmp_path)
    work([one], whole(Commands()), print)
    shutil.rmtree(one.plan.run)
    of_it = [f"{model}, {how}" for model in ("trained_at_once", "trained") for how in SAMPLINGS]
    assert one.left == ["training", *of_it]
    again = Commands()
    work([one], whole(again), print)
    assert again.names == ["train", *(piece.replace(", ", "-") for piece in of_it)]
    assert one.left == []


def test_rollouts_that_fail_are_asked_again(tmp_path: Path) -> None:
    one, commands = seed(tmp_path), Commands(failing=2)  # of the start's first measurement
    work([one], whole(commands), print)
    assert one.left == [] and commands.names[:5] == ["warm-start", *["step-2"] * 3, "train"]


def test_a_seed_that_cannot_be_measured_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    one, two = seed(tmp_path), seed(tmp_path, 1)
    with pytest.raises(WikiError, match=r"seed 0: rollouts fail each of 3 times \(1 by RolloutT"):
        work([one, two], whole(Commands(failing=3)), print)
    assert one.left[0] == "start" and two.left == []


def test_a_file_phase_that_took_all_of_a_slice_leaves_its_first_command_some() -> None:
    now, over = [0.0], list[bool]()

    def forage(words: object, log: object, is_over: Callable[[], bool], *_: object) -> None:
        for later in (0.0, FIRST_S - 1.0, 2.0):
            now[0] += later
            over.append(is_over())

    time_left = Slice(5.0, forage, lambda: now[0])
    now[0] = 3600.0
    time_left(["warm-start"], Path("log"))
    assert over == [False, False, True]


def test_kinds_are_joined_by_id_from_the_task_s_file(tmp_path: Path) -> None:
    facts = seed(tmp_path).facts
    assert [(f.id, f.kind, f.hops) for f in facts.values()] == [
        ("q0", "origin", 1),
        ("q1", "older", 2),
        ("q2", "year", 1),
        ("q3", "origin", 1),
    ]


def test_a_model_that_is_gone_is_named(tmp_path: Path) -> None:
    one = seed(tmp_path)
    work([one], whole(Commands(ends_at=2 + 1 + 6 + 1)), print)
    (one.plan.run / "checkpoints" / f"step-{STEPS}").rename(tmp_path / "elsewhere")
    with pytest.raises(WikiError, match=rf"step-{STEPS} is gone: remove {one.plan.run} and it"):
        work([one], whole(Commands()), print)


def test_what_there_is_is_reported_and_what_is_left_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    options = BenchWikiOptions(out=tmp_path, json=file, seeds=(0, 1))
    seeds = [seed(tmp_path, number) for number in (0, 1)]
    present(options, told(options, seeds), left_of((0, 1), seeds))
    assert not file.exists() and not [*tmp_path.glob("measured-*")]  # nothing yet
    work([seeds[0]], whole(Commands()), print)
    present(options, told(options, seeds), left_of((0, 1), seeds))
    found = json.loads(file.read_text())
    assert found["left"] == left_of((0, 1), seeds) and found["left"][0] == "seed 1: start"
    assert left_of((0, 1), seeds[:1]) == ["seed 1: files"]  # it was not come to
    assert found["em"].keys() == METHODS.keys()
    assert found["em"]["trained"]["greedy"]["by_seed"] == {"0": 0.5}
    assert found["difference"]["rag"]["sampled"]["questions"] == 4
    assert found["by_hops"]["2"]["questions"] == 1 and next(iter(found["by_kind"])) == "origin"
    assert found["curve"]["0"]["reward"] == [0.5, 1.0] and "1" not in found["curve"]
    assert found["models"]["0"]["supervised"]["measured"] == {"4": 0.5, "8": 0.5, "12": 0.5}
    assert found["code"]["otherwise"] == []
    assert found["goals"]["minus_supervised_sampled"] == 0.0
    assert found["goals"]["over_rag_greedy"] < 0 == found["goals"]["refits"]
    assert found["behaviour"]["no_search"]["greedy"]["answered"] == 0.0
    said = capsys.readouterr().out
    assert "no_search_trained" in said and "2 hops" in said
    assert "goals of the trained model" in said and "over_rag_greedy" in said and "missed" in said
    assert "other code" not in said
    assert (tmp_path / "wiki.png").stat().st_size > 0


def test_a_run_that_has_gone_further_is_refused(tmp_path: Path) -> None:
    work([seed(tmp_path)], whole(Commands()), print)
    seed(tmp_path).check_length()
    longer = seed(tmp_path, steps=STEPS + 1)
    longer.check_length()
    assert "training" in longer.left
    with pytest.raises(
        ConfigError, match=r"seed 0: its run has 2 steps, 1 are wanted: .*--steps 2"
    ):
        seed(tmp_path, steps=1).check_length()


def test_pieces_of_other_code_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = seed(tmp_path)
    monkeypatch.setattr(seeding, "code_digest", lambda: "yesterday's")
    work([one], whole(Commands(ends_at=4)), print)  # in the supervised baseline
    assert one.made_otherwise == []
    monkeypatch.setattr(seeding, "code_digest", lambda: "today's")
    work([one], whole(Commands()), print)
    assert one.made_otherwise == ["start", "training", "supervised"]
    (one.folder / seeding.CODE).unlink()
    assert one.made_otherwise == list(PIECES)


def test_a_piece_that_was_begun_elsewhere_is_named(tmp_path: Path) -> None:
    one = seed(tmp_path)
    one.plan.start.mkdir(parents=True)  # forage demo wiki was ended there
    work([one], whole(Commands()), print)
    assert one.made_otherwise == ["start"]


def test_a_piece_that_no_time_is_left_for_is_not_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, now = seed(tmp_path), [0.0]
    monkeypatch.setattr(seeding, "code_digest", lambda: "yesterday's")

    def forage(words: list[str], log: Path | None, *_: object) -> None:
        Commands()(words, log)
        now[0] += 600.0

    work([one], Slice(20.0, forage, lambda: now[0]), print)
    assert one.left[0] == "training"
    monkeypatch.setattr(seeding, "code_digest", lambda: "today's")
    work([one], whole(Commands()), print)
    assert one.made_otherwise == ["start"]


def test_fewer_questions_than_asked_are_in_the_title(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = seed(tmp_path, questions=9)
    work([one], whole(Commands()), print)
    options = BenchWikiOptions(out=tmp_path)
    present(options, told(options, [one]), [])
    assert "3 fewer than asked of seed 0; 2 steps" in capsys.readouterr().out


def test_figures_of_nothing_are_none(tmp_path: Path) -> None:
    found = summary([measured_of(seed(tmp_path), tmp_path, {}, {})])
    assert found["em"]["trained"] == {"greedy": None, "sampled": None}
    assert found["behaviour"]["start"]["greedy"] is None and found["models"]["0"]["trained"] is None


def test_a_seed_measured_elsewhere_is_taken_from_its_file(tmp_path: Path) -> None:
    both, file = BenchWikiOptions(out=tmp_path / "both"), tmp_path / "figures.json"
    seeds = [seed(tmp_path, number) for number in (0, 1)]
    work(seeds, whole(Commands()), print)
    both.out.mkdir()
    together = told(both, seeds)
    files = [*sorted((tmp_path / "both").glob("measured-*.json"))]
    assert len(files) == 2
    alone = BenchWikiOptions(out=tmp_path / "one", json=file, seeds=(0, 1), add=(files[0],))
    elsewhere = added(alone.add)
    alone.check_added(elsewhere)
    with pytest.raises(ConfigError, match="--add, seed 0: it is not among --seeds: name it"):
        replace(alone, seeds=(1,)).check_added(elsewhere)
    assert [*elsewhere] == [0]
    assert summary([*elsewhere.values(), together[1]]) == summary(together)
    alone.out.mkdir()
    present(alone, [*elsewhere.values(), together[1]], [])
    assert json.loads(file.read_text())["machines"] == {"0": {"cores": 2}, "1": {"cores": 2}}


def test_seeds_are_put_together_on_a_machine_without_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, options = seed(tmp_path), BenchWikiOptions(out=tmp_path, seeds=(0,))
    work([one], whole(Commands()), print)
    told(options, [one])
    elsewhere = added(tmp_path.glob("measured-*.json"))
    monkeypatch.setattr(settings, "lacks_bf16", lambda: True)
    options.check_added(elsewhere)
    with pytest.raises(ConfigError, match=r"model\.dtype bfloat16 there, float32 here"):
        replace(options, seeds=(0, 1)).check_added(elsewhere)  # seed 1 would be measured here


def test_a_seed_names_the_machine_that_measured_it(tmp_path: Path) -> None:
    options, one = BenchWikiOptions(out=tmp_path), seed(tmp_path)
    work([one], whole(Commands(ends_at=6)), print)
    told(options, [one])
    again = measured_of(one, options.out, options.settings, {"cores": 64})
    assert again.machine == {"cores": 2}
    spent = one.folder / "seconds.json"
    spent.write_text('{"supervised": 1500.0}')  # in a slice that ended no piece
    again = measured_of(one, options.out, options.settings, {"cores": 64})
    assert again.machine == {"cores": 2} and again.seconds["supervised"] == 1500.0
    work([one], whole(Commands()), print)
    further = measured_of(one, options.out, options.settings, {"cores": 64})
    assert further.machine == {"cores": 64} and not further.left


def test_a_damaged_record_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = seed(tmp_path)
    work([one], whole(Commands()), print)
    (one.plan.start / "choice.json").write_text("{broken")
    monkeypatch.setattr(benching, "build", lambda *_: one.plan.files)
    monkeypatch.setattr(benching, "planned", lambda *_: one.plan)
    monkeypatch.setattr(benching, "check_machine", lambda _: None)
    monkeypatch.setattr(Seed, "check_length", lambda _: None)
    with pytest.raises(BenchError, match=r"choice\.json cannot be read .*: remove "):
        benching.measure(BenchWikiOptions(out=tmp_path, seeds=(0,)))


def test_what_cannot_stand_beside_the_others_is_refused(tmp_path: Path) -> None:
    options = BenchWikiOptions(out=tmp_path)
    one, begun = seed(tmp_path), seed(tmp_path, 1)
    work([one], whole(Commands()), print)
    work([begun], whole(Commands(ends_at=4)), print)
    told(options, [one, begun])
    whole_one, in_part = sorted(tmp_path.glob("measured-*.json"))
    lacking, garbage = tmp_path / "lacking.json", tmp_path / "garbage.json"
    found = json.loads(whole_one.read_text())
    del found["outcomes"]["rag"]
    lacking.write_text(json.dumps(found))
    garbage.write_bytes(b"\xff{")
    for files, said in (
        ((in_part,), "supervised is left: finish it where it was begun"),
        ((whole_one, whole_one), "seed 0 is there twice: drop one"),
        ((lacking,), "lacking.json': no measured-….json of this version: give the command"),
        ((garbage,), "garbage.json': no measured-….json of this version: give the command"),
        ((tmp_path / "none.json",), "none.json': No such file or directory: name what --out"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            added(files)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 80}, "--add, seed 0: steps 36 there, 80 here: measure both with"),
        ({"overrides": ("model.dtype=float32",)}, "model.dtype bfloat16 there, float32 here: "),
        ({"overrides": ("learner.lr=1e-5",)}, "learner.lr 4e-05 there, 1e-05 here: measure both"),
        ({"questions": 20}, "questions 176 there, 20 here"),
        ({"overrides": ("actors.kv_cache_bytes=1000000",)}, ""),  # fits a machine
        ({"overrides": ("learner.micro_batch_tokens=2048", "learner.threads=4")}, ""),
    ],
)
def test_seeds_of_other_settings_are_refused(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    one = seed(tmp_path)
    work([one], whole(Commands()), print)
    told(BenchWikiOptions(out=tmp_path), [one])
    elsewhere = added(tmp_path.glob("measured-*.json"))
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        BenchWikiOptions(out=tmp_path, **given).check_added(elsewhere)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"overrides": ("learner.stepz=3",)}, "unknown key 'learner.stepz'"),
        ({"overrides": ("seed=3",)}, "seed is what --seeds says"),
        ({"overrides": ("run_dir=x",)}, "each seed has its own run folder: drop run_dir"),
        ({"steps": 0}, "--steps 0: at least 1"),
        ({"minutes": 2}, "--minutes 2: at least 5"),
    ],
)
def test_what_it_cannot_measure_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BenchWikiOptions(**given)


def test_other_text_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching, "build", None)
    with pytest.raises(ConfigError, match=r"retrieval.index is the wiki task's own: .*quickstart"):
        benching.measure(BenchWikiOptions(overrides=("retrieval.index=x",)))


def test_the_tasks_are_those_of_the_demo() -> None:
    options = BenchWikiOptions(seeds=(2, 2, 4), steps=3, overrides=("learner.lr=1e-5",))
    assert [each.seed for each in options.wanted] == [2, 4] and options.asked == 176
    assert options.wanted[0].steps == 3 and options.wanted[0].overrides == ("learner.lr=1e-5",)
    quick = BenchWikiOptions(quick=True)
    assert [(each.seed, each.quick) for each in quick.wanted] == [(0, True)] and quick.asked == 64
    assert quick.schedule == Schedule(patience=0, questions=64) != options.schedule
    assert "supervised" in quick.settings.keys() - options.settings.keys()


@pytest.mark.soak("wiki")
@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_a_tiny_model_is_measured_in_slices(spelling_model_path: Path, tmp_path: Path) -> None:
    lengthened(spelling_model_path, tmp_path / "model")
    out, file, codes = tmp_path / "out", tmp_path / "figures.json", list[int]()
    command = [sys.executable, "-m", "tests.scripts.bench.wiki.tiny", str(tmp_path), *FEW]
    command += ["--seeds", "0", "--steps", "2", "--questions", "4", "--minutes", "5"]
    command += ["--out", str(out), "--json", str(file)]
    while not codes or codes[-1] == Exit.STOPPED:
        codes.append(subprocess.run(command, cwd=REPOSITORY, check=False).returncode)
    assert codes[-1] == Exit.DONE
    found = json.loads(file.read_text())
    assert found["left"] == [] and found["models"]["0"]["trained"] == 2
    assert all(of[how]["questions"] == 4 for of in found["em"].values() for how in SAMPLINGS)
    assert found["curve"]["0"]["step"] and found["behaviour"]["start"]["greedy"]["action_tokens"]
    shown = json.loads((out / "rollouts.json").read_text())
    assert [each["when"] for each in shown] == ["before", "after"] * (len(shown) // 2) and shown
    assert (out / "wiki.png").stat().st_size > 0
