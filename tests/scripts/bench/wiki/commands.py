"""Stand-ins for `forage`: each writes what the real command would leave, and no more."""

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from configs.load import load, save
from replay.log.event_log import FILE_NAME, EventLog
from replay.log.records import EvaluationFinished, Reported
from replay.protocol import EvalResult
from scripts.bench.wiki.seed import Seed
from scripts.bench.wiki.supervised import Learnt, Schedule
from scripts.evaluation.rows import Row
from scripts.wiki.pipeline import pipeline
from scripts.wiki.pipeline.commands import OutOfTime
from scripts.wiki.pipeline.pipeline import Plan
from scripts.wiki.pipeline.settings import CONFIG, WikiOptions
from scripts.wiki.pipeline.start import Recipe
from scripts.wiki.wiki import WikiFiles

KINDS = {"origin": 1, "older": 2, "year": 1}
STEPS = 2


class Commands:
    """`validation`: sampled EM by steps of a warm start, else .5; `ends_at`: the command that is
    ended by its slice, by its number; `failing`: how many evaluations have a rollout that fails.
    """

    def __init__(
        self, validation: dict[int, float] | None = None, ends_at: int = 0, failing: int = 0
    ) -> None:
        self.validation, self.ends_at, self.failing = validation or {}, ends_at, failing
        self.asked: list[list[str]] = []

    def __call__(self, words: Sequence[str], log: Path | None, *_: object) -> None:
        self.asked.append(list(words))
        if len(self.asked) == self.ends_at:
            raise OutOfTime(f"forage {words[0]}")
        {"warm-start": self._learn, "train": self._train, "evaluate": self._evaluate}[words[0]](
            list(words)
        )

    @property
    def names(self) -> list[str]:
        """The commands in order, an evaluation by its folder."""
        return [w[0] if w[0] != "evaluate" else folder_of(w) for w in self.asked]

    def _learn(self, words: list[str]) -> None:
        model = Path(_after(words, "--out")) / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "steps").write_text(_after(words, "--steps"))
        (model.parent / "config.yaml").touch()
        (model.parent / "checkpoints" / "step-1").mkdir(parents=True, exist_ok=True)

    def _train(self, words: list[str]) -> None:
        config = load(words[1], words[2:])
        run = Path(config.run_dir)
        model = run / "checkpoints" / f"step-{STEPS}"
        model.mkdir(parents=True)
        (model / "config.json").write_text(secrets.token_hex())  # never the same to the bit
        save(config, run / "config.yaml")
        summary = {"status": "completed", "steps": STEPS, "wall_s": 90.0}
        summary |= {"token_mismatches": 0, "refits": 0, "retrieval_errors": 0}
        (run / "summary.json").write_text(json.dumps(summary))
        with EventLog.create(run / FILE_NAME) as log:
            gauges = [{"actor/reward": step / STEPS} for step in range(STEPS + 1)]
            log.append([Reported(1.0, 1, step, of) for step, of in enumerate(gauges)])
            ends = [EvalResult(n, 4, 0.5, 0.25, {}, {}, 1.0, n, n) for n in (0, STEPS)]
            log.append([EvaluationFinished(2.0, each) for each in ends])

    def _evaluate(self, words: list[str]) -> None:
        (given,) = (word for word in words if word.startswith("asked="))
        model, out = Path(words[1]), Path(_after(words, "--out"))
        steps = model / "model" / "steps" if (model / "model").is_dir() else model / "steps"
        em = self.validation.get(int(steps.read_text()), 0.5) if steps.exists() else 0.0
        environments = words[words.index("--environment") + 1 :] if "--environment" in words else []
        lines = Path(given.removeprefix("asked=")).read_text().splitlines()
        ids = [json.loads(line)["id"] for line in lines][: int(_after(words, "--limit"))]
        failures = {"RolloutTimeout": 1, "BadQuery": 1} if self.failing > 0 else {"BadQuery": 1}
        self.failing -= 1
        scores = {"em": {"mean": em}}
        figures = {"asked": {"questions": len(ids), "failures": failures, "scores": scores}}
        out.mkdir(exist_ok=True)
        rows = [
            Row(set="asked", id=id, environment=e, sample=0, question="?", gold=(), em=float(n % 2))
            for e in environments
            for n, id in enumerate(ids)
        ]
        (out / "rows.jsonl").write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in rows))
        report = {"methods": dict.fromkeys(environments or ["own"], figures)}
        (out / "report.json").write_text(json.dumps(report))


def files(folder: Path, questions: int = 6) -> WikiFiles:
    """A task of so many held-out questions; their kinds in turn, and in another order."""
    made = {name: folder / name for name in WikiFiles.__dataclass_fields__}
    made["model"].mkdir(parents=True, exist_ok=True)
    asked = [(f"q{n}", list(KINDS)[n % len(KINDS)]) for n in range(questions)]
    for name in ("eval", "validation"):
        made[name].write_text("".join(json.dumps({"id": id}) + "\n" for id, _ in asked))
    made["demonstrations"].write_text("{}\n" * 8)
    facts = [{"id": id, "kind": kind, "hops": KINDS[kind]} for id, kind in reversed(asked)]
    made["kinds"].write_text("".join(json.dumps(each) + "\n" for each in facts))
    return WikiFiles(**made)


def seed(folder: Path, number: int = 0, questions: int = 4, steps: int = STEPS) -> Seed:
    """A seed of which nothing is there; everything it makes lies in the folder."""
    home = folder / str(number)
    options = WikiOptions(number, steps=steps, overrides=(f"run_dir={home / 'run'}",))
    plan: Plan = pipeline.planned(options, files(home / "files"), home, Recipe(first=2, last=2))
    assert load(CONFIG, plan.of_run).learner.total_steps == steps
    return Seed(number, plan, folder / "out", questions, Schedule(every=4, patience=2))


def folder_of(words: Sequence[str]) -> str:
    """The name of an evaluation's folder, without the digest of its weights."""
    return re.sub("-[0-9a-f]{8}$", "", Path(_after(words, "--out")).name)


def _after(words: Sequence[str], option: str) -> str:
    return words[words.index(option) + 1]


def ems_of(learnt: Learnt) -> list[float]:
    """Exact match, by measurement."""
    return [each.sampled_em for each in learnt.measured]
