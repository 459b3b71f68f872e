"""Weights & Biases: its own settings and environment (WANDB_MODE, WANDB_ENTITY, …) hold.

Neither console, code, command line nor statistics of the machine are sent.
"""

import os
from collections.abc import Mapping

import wandb

from learner.metrics.tracker import Opening

_STEP = "step"


def open_run(opening: Opening) -> "WandbRun":
    """Begin or go on with the run of this id. Raises what the client raises."""
    run = wandb.init(
        project=opening.project,
        name=opening.name,
        id=opening.id,
        resume="allow",
        dir=os.environ.get("WANDB_DIR", opening.folder),
        config=opening.config,
        allow_val_change=True,
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
        ),
    )
    return WandbRun(run)


class WandbRun:
    """One run there."""

    def __init__(self, run: "wandb.Run") -> None:
        self._run = run
        # Of its own count of calls nothing is made: evaluations come after later steps.
        run.define_metric(_STEP, hidden=True)
        run.define_metric("*", step_metric=_STEP)

    def write(self, step: int, gauges: Mapping[str, float]) -> None:
        """Take numbers by name at a step."""
        self._run.log({**gauges, _STEP: step})

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._run.finish()
