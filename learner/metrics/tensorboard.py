"""TensorBoard files in `<run_dir>/tensorboard`. No other module writes TensorBoard."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from configs.schema import Config
from learner.metrics.histograms import Histogram
from learner.metrics.layout import custom_scalars
from learner.metrics.settings import hyper_parameters

# A run of TensorBoard's own: its HParams tab takes every number of a run that has hyper-parameters
# for a result, and shall find the last evaluation alone.
RESULTS = "hparams"


class TensorBoard:
    """The run's event files."""

    def __init__(
        self, run_dir: str | Path, purge_step: int | None = None, config: Config | None = None
    ) -> None:
        """`purge_step` hides what an earlier process of the run wrote at that step and after it.
        With the run's `config` come the charts of the layout and the hyper-parameters.
        """
        folder = Path(run_dir) / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)
        self._results: SummaryWriter | None = None
        if config:
            self._writer.add_custom_scalars(custom_scalars())
            self._results = SummaryWriter(str(folder / RESULTS), purge_step=purge_step)
            _, begun, _ = hparams(hyper_parameters(config), {})
            self._results.file_writer.add_summary(begun)

    def write(self, step: int, gauges: Mapping[str, float]) -> None:
        """Write numbers by name at a step."""
        for name, value in gauges.items():
            self._writer.add_scalar(name, value, step)

    def result(self, step: int, scores: Mapping[str, float]) -> None:
        """Write what an evaluation came to, beside the hyper-parameters that led there."""
        if self._results:
            for name, value in scores.items():
                self._results.add_scalar(name, value, step)

    def histograms(self, step: int, found: Mapping[str, Histogram]) -> None:
        """Write bars by tag at a step; their moments are those of the bars' middles."""
        for tag, histogram in found.items():
            edges, counts = np.array(histogram.edges), np.array(histogram.counts)
            middles, taken = (edges[1:] + edges[:-1]) / 2.0, counts.nonzero()[0]
            self._writer.add_histogram_raw(
                tag,
                min=float(edges[taken[0]]),  # TensorBoard begins the first bar that counts there
                max=float(edges[taken[-1] + 1]),
                num=float(counts.sum()),
                sum=float(counts @ middles),
                sum_squares=float(counts @ middles**2),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
            )

    def texts(self, tag: str, step: int, texts: Sequence[str]) -> None:
        """Write texts in Markdown at a step, as `tag/1`, `tag/2` …"""
        for number, text in enumerate(texts, 1):
            self._writer.add_text(f"{tag}/{number}", text, step)

    def flush(self) -> None:
        """Hand everything to the operating system: what is flushed outlives this process."""
        self._writer.flush()
        if self._results:
            self._results.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
        if self._results:
            self._results.close()
