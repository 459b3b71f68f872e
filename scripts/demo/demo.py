"""The demo: the whole loop on two cores, on a task that is prepared first and cached."""

import time
from dataclasses import dataclass
from typing import Literal

from configs.load import load
from configs.runtime.process import REPOSITORY
from scripts.options import Options, option, overrides
from scripts.setup.resolve import resolve


class DemoFailed(Exception):
    """The demo's task could not be prepared; the message names the remedy."""


@dataclass(frozen=True)
class DemoOptions(Options):
    overrides: tuple[str, ...] = overrides()
    seed: int = option("of the world, the cold start and the run (default 0)", default=0, least=0)
    retrieval: Literal["bm25", "dense"] = option(
        "by words, or by the vectors of an encoder that is trained first", default="bm25"
    )


def demo(options: DemoOptions) -> int:
    """Prepare, launch, and print where everything is; the run's exit code. Raises ConfigError
    before anything is prepared, and DemoFailed.
    """
    from scripts.setup.preflight import check_machine  # late: it takes seconds

    begun, config = time.monotonic(), str(REPOSITORY / "configs" / "demo.yaml")
    seeded = (f"seed={options.seed}", *options.overrides)
    check_machine(resolve(load(config, seeded), "demo"))
    print(f"preparing the demo task (seed {options.seed}) ...", flush=True)
    settings = _prepare(options.seed, options.retrieval == "dense")
    print(f"  demo task ready: {time.monotonic() - begun:.1f} s", flush=True)

    from scripts.fleet.launch import TrainOptions, train

    code = train(TrainOptions(config=config, overrides=(*settings, *seeded)))
    print(f"make demo took {time.monotonic() - begun:.0f} s (installation not included)")
    return code


def _prepare(seed: int, dense: bool) -> list[str]:
    from retrieval_server.protocol import BadIndex
    from scripts.demo.encoder import EncoderFailed, prepare_index  # it takes seconds
    from scripts.demo.start import ColdStartFailed
    from scripts.demo.task import prepare

    cache = REPOSITORY / ".cache"
    try:
        files = prepare(cache, seed, _tell)
        index = prepare_index(cache, seed, files.corpus, _tell) if dense else None
    except (ColdStartFailed, EncoderFailed) as error:
        raise DemoFailed(f"{error}; try another SEED") from error
    except BadIndex as error:
        raise DemoFailed(str(error)) from error
    settings = [
        f"model.path={files.model}",
        f"questions.train={files.train}",
        f"questions.eval={files.eval}",
        f"retrieval.corpus={files.corpus}",
    ]
    return [*settings, f"retrieval.index={index}"] if index else settings


def _tell(line: str) -> None:
    print(f"  {line}", flush=True)
