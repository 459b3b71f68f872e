"""The plot of a relearnt run: one panel a quantity, over steps.

Consumes rows as `scripts/relearn.py` makes them; produces a PNG. A quantity that was never measured
(the KL without an anchor) has no panel.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

PANELS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "ess": "ESS (fraction)",
    "clip_fraction": "clipped fraction",
    "behaviour_kl": "KL to the behaviour",
    "anchor_kl": "KL to the anchor",
}


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> Path:
    """Write the plot and return where; the run's own loss is drawn beneath the relearnt one."""
    shown = [name for name in PANELS if any(row[name] is not None for row in rows)]
    figure, panels = pyplot.subplots(
        len(shown), 1, figsize=(8, 2 * len(shown)), sharex=True, squeeze=False
    )
    steps = [row["step"] for row in rows]
    for name, axes in zip(shown, panels[:, 0], strict=True):
        if name == "loss" and any(row["recorded_loss"] is not None for row in rows):
            recorded = [_number(row["recorded_loss"]) for row in rows]
            axes.plot(steps, recorded, color="#d9a441", linewidth=4, alpha=0.5, label="recorded")
            axes.plot(steps, [row["loss"] for row in rows], color="#1b6ca8", label="relearnt")
            axes.legend(frameon=False)
        else:
            axes.plot(steps, [_number(row[name]) for row in rows], color="#1b6ca8")
        axes.set_ylabel(PANELS[name])
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_title(title)
    panels[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
