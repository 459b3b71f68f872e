"""Several ranks of one learner: rank 0 leads, the others do what it calls, together with it.

Consumes the trainer's calls on rank 0; produces the same calls on every rank. A follower waits for
its next call for as long as rank 0 lives (batches and evaluations have their own deadlines there);
joining, a call, and every collective in it have `learner.step_deadline_s`. A lost rank is named.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from configs.process import announce_ready
from configs.schema import Config
from learner.batch import TrainingBatch
from learner.crew import Crew, assemble, enlist
from learner.engine import join
from learner.errors import BadBatch, BadModel, RankLost
from learner.exchange import decode_share, encode_share
from learner.link import CLOSE
from learner.trainer import Trainer
from learner.watchdog import die, phase


class Leader(Trainer):
    """Rank 0 of several: a trainer whose calls the other ranks make too."""

    def __init__(self, config: Config, model_path: str | None, crew: Crew) -> None:
        """The crew has joined; `close` dismisses it."""
        self._crew = crew
        super().__init__(config, model_path)

    def learn(self, shares: Sequence[TrainingBatch]) -> dict[str, float]:
        """Scatter the shares, one per rank, and take the step."""
        with self._scattered("learn", shares):
            return super().learn(shares[:1])

    def imitate(self, shares: Sequence[TrainingBatch]) -> dict[str, float]:
        """See Trainer; scatters the shares."""
        with self._scattered("imitate", shares):
            return super().imitate(shares[:1])

    def measure(self, shares: Sequence[TrainingBatch]) -> float:
        """See Trainer; scatters the shares."""
        with self._scattered("measure", shares):
            return super().measure(shares[:1])

    def probe(self, tokens: Sequence[int]) -> list[float]:
        """See Trainer."""
        with self._crew.naming():
            self._crew.tell("probe", list(tokens))
            return super().probe(tokens)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See Trainer; the others gather along, so what the caller leaves over is gathered too."""
        with self._crew.naming():
            self._crew.tell("named_weights")
            weights = super().named_weights()
            try:
                for named in weights:  # noqa: UP028 (must outlive this generator)
                    yield named
            finally:
                for _ in weights:
                    pass

    def export(self, folder: Path) -> None:
        """See Trainer."""
        with self._crew.naming():
            self._crew.tell("export", str(folder))
            super().export(folder)

    def restore(self, folder: Path) -> None:
        """See Trainer."""
        with self._crew.naming():
            self._crew.tell("restore", str(folder))
            super().restore(folder)

    def close(self) -> None:
        """Let the others go, and release the engine."""
        self._crew.dismiss()
        with contextlib.suppress(RankLost):
            self._crew.tell(CLOSE)
        super().close()
        self._crew.close()

    @contextlib.contextmanager
    def _scattered(self, what: str, shares: Sequence[TrainingBatch]) -> Iterator[None]:
        """Have the others make this call on their shares, while rank 0 makes it on its own."""
        if len(shares) != self.ranks:
            raise BadBatch(f"{len(shares)} shares for learner.ranks = {self.ranks}: build as many")
        with self._crew.naming():
            for rank, link in self._crew.links.items():
                link.send(what, encode_share(shares[rank]))
            yield


def lead(
    config: Config, model_path: str | None = None, on_stall: Callable[[str], None] = die
) -> Trainer:
    """The trainer of rank 0, once every other rank has joined. Raises BadModel and RankLost.

    `on_stall(message)` must end the process: a rank was lost while nothing here would notice.
    """
    learner = config.learner
    if learner.ranks == 1:
        with phase("loading the model", learner.step_deadline_s, on_stall):
            return Trainer(config, model_path)
    crew = Crew(on_stall)
    try:
        with crew.naming():
            join(assemble(config, crew), 0, learner)
            with phase("loading the model", learner.step_deadline_s, on_stall):
                return Leader(config, model_path, crew)
    except BaseException:
        crew.close()
        raise


def follow(
    config: Config,
    rank: int,
    model_path: str | None = None,
    on_stall: Callable[[str], None] = die,
) -> None:
    """Be rank `rank` > 0: join, then serve rank 0's calls until it closes.

    Raises BadModel and RankLost; `on_stall` as in `lead`.
    """
    learner = config.learner
    if not 0 < rank < learner.ranks:
        raise BadModel(
            f"rank {rank!r}: learner.ranks = {learner.ranks!r} allows 1 to {learner.ranks - 1}"
        )
    crew = Crew(on_stall)
    try:
        with crew.naming():
            link, store = enlist(config, rank, crew)
            join(store, rank, learner)
            with phase(f"loading the model on rank {rank}", learner.step_deadline_s, on_stall):
                trainer = Trainer(config, model_path)
            announce_ready()
            while (call := link.receive())[0] != CLOSE:
                name = f"{call[0]} on rank {rank}"
                with phase(name, learner.step_deadline_s, on_stall):
                    _serve(trainer, *call)
            crew.dismiss()
            trainer.close()
    except RankLost:
        raise
    except Exception as error:
        with contextlib.suppress(RankLost):
            crew.tell("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        crew.close()


def _serve(trainer: Trainer, what: str, value: Any) -> None:
    if what == "learn":
        trainer.learn([decode_share(value)])
    elif what == "imitate":
        trainer.imitate([decode_share(value)])
    elif what == "measure":
        trainer.measure([decode_share(value)])
    elif what == "probe":
        trainer.probe(value)
    elif what == "named_weights":
        for _ in trainer.named_weights():
            pass
    elif what == "export":
        trainer.export(Path(value))
    elif what == "restore":
        trainer.restore(Path(value))
    else:
        raise RankLost(f"rank 0 of the learner called {what!r}, which no rank can do")
