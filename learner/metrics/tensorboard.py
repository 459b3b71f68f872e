"""TensorBoard files in `<run_dir>/tensorboard`. No other module writes TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """The run's event files."""

    def __init__(self, run_dir: str | Path, purge_step: int | None = None) -> None:
        """`purge_step` hides what an earlier process of the run wrote at that step and after it."""
        self._writer = SummaryWriter(
            str(Path(run_dir) / "tensorboard"), purge_step=purge_step, flush_secs=10
        )

    def write(self, step: int, gauges: Mapping[str, float]) -> None:
        """Write numbers by name at a step."""
        for name, value in gauges.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Hand everything to the operating system: what is flushed outlives this process."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
