"""What vLLM tells of each of its steps, as an actor's gauges and as the load that capacity needs.

vLLM calls `record` (its StatLogger, by shape) on the event loop after each of the engine's steps.
Nothing is written to any log.

An update that drops the caches preempts every request that runs; they come back with their events
in later steps. So as many preemptions are set down to updates as ran when one began.
"""

from collections import deque
from typing import Any

from actors.policies.capacity import Load

RECENT = 1000  # requests, of the prefix cache's hit rate; steps, of the accepted drafts


class EngineStatistics:
    """The statistics of one engine. `kv_tokens`: what its cache holds, once it has started;
    `preemptions`: so far, without those of updates.
    """

    def __init__(self) -> None:
        self.kv_tokens = self.preemptions = 0
        self._load = Load()
        self._peak_use, self._queued, self._running = 0.0, 0, 0
        self._steps = self._ran = 0  # since the last look: steps, and what ran in each, summed
        self._of_updates = self._again_of_updates = 0  # preempted by updates, not yet heard of
        self._prefilled_again = 0
        self._lookups: deque[tuple[int, int, int]] = deque()  # requests, tokens, found
        self._drafts: deque[tuple[int, int]] = deque(maxlen=RECENT)  # tokens drafted, accepted
        self._requests = self._tokens = self._found = 0  # the sums of these

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take in one step; either may be None."""
        preempted = iteration_stats.num_preempted_reqs if iteration_stats is not None else 0
        of_updates = min(preempted, self._of_updates)
        self._of_updates -= of_updates
        self.preemptions += preempted - of_updates
        if scheduler_stats is None:
            self._load = self._load.and_then(Load(preemptions=preempted - of_updates))
            return
        self._running = scheduler_stats.num_running_reqs
        self._queued = scheduler_stats.num_waiting_reqs
        self._steps, self._ran = self._steps + 1, self._ran + self._running
        use = scheduler_stats.kv_cache_usage
        self._peak_use = max(self._peak_use, use)
        step = Load(use, preempted - of_updates, 1, int(self._queued > 0))
        self._load = self._load.and_then(step)
        self._look_up(scheduler_stats.prefix_cache_stats)
        if (drafts := scheduler_stats.spec_decoding_stats) is not None:
            self._drafts.append((drafts.num_draft_tokens, drafts.num_accepted_tokens))

    def updated(self) -> None:
        """Note that an update has dropped the caches, and preempted what ran."""
        # What is left of an earlier one was aborted meanwhile, at most as much as runs now.
        self._of_updates = min(self._of_updates, self._running) + self._running
        self._again_of_updates = min(self._again_of_updates, self._running) + self._running

    def take_load(self) -> Load:
        """Return the load since the last call."""
        load, self._load = self._load, Load()
        return load

    def gauges(self) -> dict[str, float]:
        """Return the engine's numbers; the peak use and a step's requests are since the last call,
        and no step has no requests.
        """
        peak, self._peak_use = self._peak_use, 0.0
        drafted = sum(tokens for tokens, _ in self._drafts)
        accepted = sum(tokens for _, tokens in self._drafts)
        some = {"actor/accepted_drafts": accepted / drafted} if drafted else {}
        if self._steps:
            some["actor/requests_a_step"] = self._ran / self._steps
        self._steps = self._ran = 0
        return some | {
            "actor/kv_use_max": peak,
            "actor/running_requests": float(self._running),
            "actor/queued_requests": float(self._queued),
            "actor/preemptions_total": float(self.preemptions),
            "actor/prefix_hit_rate": self._found / max(1, self._tokens),
            "sync/prefilled_again_tokens_total": float(self._prefilled_again),
        }

    def log_engine_initialized(self) -> None:
        """Say nothing."""

    def log(self) -> None:
        """Say nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing: these engines never sleep."""

    def _look_up(self, stats: Any) -> None:
        if stats.requests:
            self._lookups.append((stats.requests, stats.queries, stats.hits))
            self._count(*self._lookups[-1])
        while self._lookups and self._requests - self._lookups[0][0] >= RECENT:
            self._count(*(-number for number in self._lookups.popleft()))
        if stats.preempted_requests and self._again_of_updates:
            share = min(1.0, self._again_of_updates / stats.preempted_requests)
            self._again_of_updates -= min(self._again_of_updates, stats.preempted_requests)
            missed = stats.preempted_queries - stats.preempted_hits
            self._prefilled_again += round(share * missed)

    def _count(self, requests: int, tokens: int, found: int) -> None:
        self._requests += requests
        self._tokens += tokens
        self._found += found
