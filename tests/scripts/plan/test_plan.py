"""`forage plan`: what it prints and writes, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pytest import approx

from configs.load import load
from configs.runtime.process import REPOSITORY, Exit
from scripts import cli
from scripts.plan import hardware
from scripts.plan.build import Asked, Cores, on_cores, on_gpus, workload_of
from scripts.plan.hardware import GPUS, gpu_of, replay_per_s
from scripts.plan.simulation import simulate
from scripts.plan.split import best_split, rated, splits
from scripts.runs.forecast import forecast
from scripts.setup.fit import fitted
from scripts.setup.model_size import find_model
from tests.scripts.plan.scenarios import scenario, varied

RECIPE = REPOSITORY / "configs" / "search_r1_3b_grpo.yaml"
SHORT = ("--steps", "4")
SMALL = ("model.path=Qwen2.5-3B", "replay.groups_per_step=4", "replay.max_staleness=1",
         "weight_sync.publish_every=1", "actors.max_num_seqs=32")  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_recipe_is_planned_in_eighty_columns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ("--json", str(tmp_path / "p.json"), "--plot", str(tmp_path / "p.png"))
    code, out, _ = said(capsys, str(RECIPE), *SMALL, *SHORT, *files)
    assert code == Exit.DONE and max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 80
    for what in ("a step", "tokens/s trained", "staleness of tokens", "best of 8 GPUs",
                 "The one replay server"):  # fmt: skip
        assert what in out
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["figures"]["staleness_max"] <= 1 and written["replay"]["share"] < 0.1
    assert written["split"]["ranks"] + written["split"]["actors"] == 8
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_a_laptop_is_planned_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model.path=Qwen2.5-0.5B", "defaults=cpu", "--gpus", "0", *SHORT)
    code, out, _ = said(capsys, str(REPOSITORY / "configs" / "base.yaml"), *words)
    assert code == Exit.DONE and "on 2 cores" in out and "best of" not in out


def test_measured_constants_are_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    size = find_model("Qwen2.5-0.5B").parameters
    constants = {"parameters": size, "launch_s": 0.5, "sequence_s": 0.0, "prefill_s": 0.0,
                 "learn_token_s": 0.0, "learner_cores": 1.0, "publish_s": 0.0, "transfer_s": 0.0,
                 "pause_s": 0.0, "engine_cores": 1.0, "beside": 1.0, "queued": 1.0}  # fmt: skip
    (path := tmp_path / "m.json").write_text(json.dumps({"constants": {"demo": constants}}))
    words = (str(REPOSITORY / "configs" / "base.yaml"), "defaults=cpu", "--gpus", "0", *SHORT,
             "--measured", str(path), "--json", str(tmp_path / "p.json"))  # fmt: skip
    assert said(capsys, *words, "model.path=Qwen2.5-0.5B")[0] == Exit.DONE
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["scenario"]["engines"]["decode"]["launch_s"] == 0.5
    code, _, err = said(capsys, *words, "model.path=Qwen2.5-1.5B")
    assert code == Exit.BAD_INPUT and f"constants of {size:,} parameters" in err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--gpu", "H10"), "did you mean H100"),
        (("--gpu", "TPU"), "one of L4"),
        (("--gpus", "-1"), "at least 0"),
        (("--cores", "0"), "at least 1"),
        (("--latency", "2", "1"), "0 < median"),
        (("--latency", "2"), "give two numbers"),
        (("--no-signal", "1"), "below 1"),
        (("--gpus", "0", "--measured", "no.json"), "is no JSON of forage bench plan"),
        (("--measured", "no.json"), "give --gpus 0 with it"),
        (("--like", "runs/none", "--searches", "1"), "drop what else says"),
        (("--like", "/nowhere"), "RUN = "),
        (("--plot", "/nowhere/p.png"), "no such folder"),
        (("model.path=Qwen2.5-8B",), "of known shape"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = said(capsys, str(RECIPE), *SMALL, *SHORT, *words)
    assert code == Exit.BAD_INPUT and why in err and err.count("\n") == 1


def test_a_model_that_does_not_fit_fails(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "model.path=Qwen2.5-32B", "--gpu", "A100-40GB", *SHORT)
    code, out, _ = said(capsys, str(RECIPE), *words)
    assert code == Exit.FAILED and "too much" in out and "No split of these GPUs fits" in out


@pytest.mark.parametrize("name", ["h100", "NVIDIA H100 80GB", "A100-80GB", "rtx 4090"])
def test_a_gpu_is_known_however_it_is_written(name: str) -> None:
    assert gpu_of(name) in GPUS.values()


def test_the_replay_server_is_as_fast_as_measured() -> None:
    assert [replay_per_s(n) for n in (1, 16, 256, 1000)] == [5307, 4862, 4493, 3686]
    assert 4493 < replay_per_s(60) < 4862 and replay_per_s(50_000) == 3686
    assert replay_per_s(16, 4096) == 4862 / 2 and replay_per_s(16, 100) == 4862


def test_the_forecast_is_the_published_formula() -> None:
    slow = forecast(concurrency=300, batch=100, ratio=0.5, queue=1, tail=1.5)
    assert slow == (4.5, 0.5) and slow.staleness == 5.0
    fast = forecast(concurrency=300, batch=100, ratio=2.0, queue=3, tail=1.0)
    assert fast == (1.5, (6 + 1) / 4)


def test_the_forecast_is_what_a_simulation_without_a_bound_comes_to() -> None:
    of = scenario(varied(), actors=8, capacity=8, update_s=0.1, staleness=30, sequence_s=1e-4)
    found = simulate(of, steps=60, warm_up=20)
    before, _ = forecast(concurrency=found.in_flight, batch=16, ratio=0.1, queue=1, tail=found.tail)
    assert found.before_queue == approx(before, rel=0.3)


def test_a_gpus_speed_is_its_makers_less_what_is_not_reached() -> None:
    model = find_model("Qwen2.5-3B")
    config = fitted(load(RECIPE, ["model.path=Qwen2.5-3B"]), [79 << 30] * 8, model)
    found = on_gpus(config, model, GPUS["A100"], 8, workload_of(config, Asked()))
    decode = found.engines.decode
    assert decode.moved_s == approx(2 * model.parameters / (0.8 * 2.0e12))
    assert decode.step_s(256) > decode.step_s(1) > hardware.LAUNCH_S
    tokens = found.batch * found.workload.tokens
    passes = 5 + 1 - 1  # forward, backward, made anew; and a frozen anchor
    assert found.update_s == approx(2 * model.parameters * passes * tokens / (4 * 0.4 * 312e12))


def test_learner_and_engines_that_share_a_gpu_are_half_as_fast() -> None:
    model, config = find_model("Qwen2.5-3B"), load(RECIPE, ["model.path=Qwen2.5-3B"])
    apart, shared = (on_gpus(config, model, GPUS["H100"], n, workload_of(config, Asked()))
                     for n in (8, 7))  # fmt: skip
    assert shared.update_s == approx(2 * apart.update_s)


def test_a_core_does_what_was_measured_of_it() -> None:
    config = load(REPOSITORY / "configs" / "demo.yaml")
    costs = Cores.of_size(config, replace(find_model("Qwen2.5-0.5B"), weights=(240_000,)))
    found = on_cores(config, find_model("Qwen2.5-0.5B"), 2, costs, workload_of(config, Asked()))
    assert 256 / found.engines.decode.step_s(256) == approx(1 / 0.00025, rel=0.15)
    assert 1 / costs.learner.token_s == approx(15_700, rel=0.2)


def test_the_best_split_is_no_worse_than_any_other() -> None:
    model = find_model("Qwen2.5-3B")
    config, gpu = load(RECIPE, SMALL), GPUS["H100"]
    work = workload_of(config, Asked(searches=1.0))
    best = best_split(config, model, gpu, 5, work)
    assert best is not None and best.ranks + best.actors == 5
    for _, each in splits(config, model, gpu, 5, work):
        found = simulate(each, steps=10, warm_up=4)
        assert found.trained_per_s <= 1.1 * best.outcome.trained_per_s


def test_a_split_is_rated_by_its_slower_side() -> None:
    of = scenario(capacity=16, update_s=2.0, staleness=3)
    assert rated(of, 100.0) == approx(16 / 2.0)
    assert rated(of, 3.0) == approx(3.0)
