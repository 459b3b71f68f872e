"""The learner's values of the tokens that it trained, a file a step, for whoever looks at a run.

`<run_dir>/tokens/step-N.safetensors` is of the S sequences in the batch of step N, by group,
sibling and place in the rollout, and of the T tokens that the policy sampled in them, sequence
after sequence, turn after turn; what it read has no values.

    sequences   int64[S, 4]   group, sibling, place of the sequence in its rollout, tokens
    current     float16[T]    log-prob under the weights that the step begins with
    proximal    float16[T]    log-prob under their average; not there where no average is the centre
    ratio       float16[T]    the policy ratio, current over the centre; NaN where masked
    weight      float16[T]    the behaviour weight, as it was used
    advantage   float16[T]
    fate        uint8[T]      the place in FATES

Nothing here imports torch.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from configs.runtime.files import replacing

if TYPE_CHECKING:
    from learner.health.diagnostics import TokenFacts

FORMAT = "1"
# Masked: its behaviour log-prob is not finite; rejected: its weight is 0; clipped: the trust region
# changed its loss.
FATES = ("trained", "clipped", "rejected", "masked")
VALUES = ("current", "proximal", "ratio", "weight", "advantage")
SequenceKey = tuple[int, int, int]  # group, sibling, place in the rollout
_NAME = re.compile(r"step-(\d+)\.safetensors(\.draft)?")
_log = logging.getLogger(__name__)


def file_of(run_dir: str | Path, step: int) -> Path:
    """The file of a step, whether it is there or not."""
    return Path(run_dir) / "tokens" / f"step-{step}.safetensors"


class TokenFiles:
    """The files of a run's newest steps."""

    def __init__(self, run_dir: str | Path, keep: int, *, averages: bool) -> None:
        """Keep so many; `averages`: an average is the centre of the trust region."""
        self._run_dir, self._keep, self._averages = run_dir, keep, averages
        self._fails = False

    def write(
        self, step: int, sequences: Sequence[SequenceKey], facts: "Sequence[TokenFacts]"
    ) -> None:
        """Write a step's, and remove those that are older than the kept ones. Where the disk does
        not take it, say so once.
        """
        path = file_of(self._run_dir, step)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_until(step - self._keep, path.parent)
            with replacing(path, durable=False) as draft:
                draft.write_bytes(self._encoded(step, sequences, facts))
        except OSError as error:
            if not self._fails:
                _log.warning("%s: the values of its tokens are not kept: %s", path, error)
            self._fails = True
        else:
            self._fails = False

    def _remove_until(self, last: int, folder: Path) -> None:
        for path in folder.iterdir():
            if (found := _NAME.fullmatch(path.name)) and int(found[1]) <= last:
                path.unlink(missing_ok=True)

    def _encoded(
        self, step: int, sequences: Sequence[SequenceKey], facts: "Sequence[TokenFacts]"
    ) -> bytes:
        def column(name: str) -> NDArray[Any]:
            return np.concatenate([getattr(part, name).cpu().numpy() for part in facts])

        rows, usable = column("sequences"), column("usable")
        order = np.argsort(rows, kind="stable")  # a sequence's tokens are in order already
        values = {
            "current": column("current"),
            "ratio": np.where(usable, column("ratio"), np.nan),
            "weight": column("weight"),
            "advantage": column("advantages"),
        }
        if self._averages:
            values["proximal"] = column("proximal")
        counts = np.bincount(rows, minlength=len(sequences))
        keys = np.array(sequences, np.int64).reshape(-1, 3)
        fates = np.select([~usable, column("rejected"), column("clipped")], [3, 2, 1], 0)
        tensors = {name: _half(value[order]) for name, value in values.items()}
        tensors["sequences"] = np.column_stack([keys, counts])
        tensors["fate"] = fates[order].astype(np.uint8)
        return save(tensors, {"format": FORMAT, "step": str(step)})


def _half(values: NDArray[Any]) -> NDArray[np.float16]:
    """As float16; what is larger than any of these is the largest."""
    most = float(np.finfo(np.float16).max)
    return np.clip(values, -most, most).astype(np.float16)
