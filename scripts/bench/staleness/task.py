"""The world of a seed, as overrides of configs/demo.yaml."""

from configs.runtime.process import REPOSITORY
from scripts.demo.task import prepare


def world_of(seed: int) -> tuple[str, ...]:
    """Model, questions and corpus of the demo task; made where they are not there yet."""
    files = prepare(REPOSITORY / ".cache", seed, lambda line: print(f"  {line}", flush=True))
    return (
        f"model.path={files.model}",
        f"questions.train={files.train}",
        f"questions.eval={files.eval}",
        f"retrieval.corpus={files.corpus}",
    )
