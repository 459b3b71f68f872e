"""trackio: its own settings and environment (TRACKIO_DIR, TRACKIO_SPACE_ID, …) hold."""

from collections.abc import Mapping

import trackio

from learner.metrics.tracker import Opening


def open_run(opening: Opening) -> "TrackioRun":
    """Begin or go on with the run of this id. Raises what the client raises."""
    trackio.init(
        project=opening.project,
        name=f"{opening.name}-{opening.id}",  # it knows runs by their names
        config=opening.config,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackioRun()


class TrackioRun:
    """The run that this process has open there."""

    def write(self, step: int, gauges: Mapping[str, float]) -> None:
        """Take numbers by name at a step."""
        trackio.log(dict(gauges), step=step)

    def close(self) -> None:
        """Write what is left, and end the run."""
        trackio.finish()
