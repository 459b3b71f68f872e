"""The outputs of vLLM's requests as completions: ids, log-probs and versions, or what contradicts
itself in them. Imports nothing of vLLM.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.errors import BadCompletion, GenerationFailed
from actors.policies.base import Completion


def completion_of(output: Any, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Completion:
    """Return what a request's last output, its tokens and their log-probs make."""
    sampled = output.outputs[0]
    if sampled.finish_reason not in ("stop", "length"):
        raise GenerationFailed(f"the engine ended a completion by {sampled.finish_reason!r}")
    return Completion(
        tokens=ids,
        logprobs=logprobs,
        versions=token_versions(sampled.weight_versions, len(ids)),
        finish_reason=sampled.finish_reason,
        first_token_at=first_token_at(output.metrics),
    )


def own_logprobs(flat: Any, ids: NDArray[np.int32], skip: int = 0) -> NDArray[np.float32]:
    """Return float32[n]: the first entry of each position, which is the token's own."""
    if flat is None or len(flat) != len(ids) + skip:
        raise BadCompletion(f"{flat and len(flat)} log-probs for {len(ids)} tokens")
    starts = np.asarray(flat.start_indices[skip:], dtype=np.intp)
    if not np.array_equal(np.asarray(flat.token_ids, dtype=np.int32)[starts], ids):
        raise BadCompletion("log-probs of other tokens than the sampled ones")
    return np.asarray(flat.logprobs, dtype=np.float32)[starts]


def first_token_at(metrics: Any) -> float:
    """Return when a request's first token was there, in seconds since the epoch, from what vLLM
    counts of it; 0 where it tells nothing.
    """
    latency = metrics.first_token_latency if metrics is not None else 0.0
    return float(metrics.arrival_time + latency) if latency > 0.0 else 0.0


def token_versions(spans: Any, length: int) -> NDArray[np.int32]:
    """Return int32[length] from vLLM's contiguous spans of labels."""
    versions = np.full(length, -1, np.int32)
    for span in spans or ():
        if not span.version.isdecimal():
            raise BadCompletion(f"tokens were sampled by weights labelled {span.version!r}")
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise BadCompletion(f"spans {spans!r} do not cover {length} tokens")
    return versions
