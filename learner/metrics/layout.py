"""The charts of TensorBoard's tab "Custom Scalars": four questions that are asked of a run.

A chart's names are patterns of gauges' names, whole ones; a run has not all of them.
"""

from collections.abc import Mapping, Sequence

Charts = Mapping[str, Sequence[str]]  # title → patterns

LEARNING: Charts = {
    "exact match": ("eval/em", "eval/sampled_em"),
    "exact match by hops": (r"eval/em_hops_\d+",),
    "reward": ("learner/reward", "actor/reward"),
    "searches a rollout": ("learner/searches_per_rollout", "eval/searches_per_rollout"),
    "groups without a gradient": ("replay/no_signal_fraction", "learner/no_signal_fraction"),
    "turns and rollouts that fail": ("learner/malformed_fraction", "learner/limit_fraction"),
}
STABLE: Charts = {
    "sentinels that fire, and rollbacks": ("learner/sentinels_fired", "learner/rollbacks"),
    "learning rate": ("learner/lr", "learner/critic_lr"),
    "entropy": ("learner/entropy",),
    "gradient norm": ("learner/grad_norm", "learner/critic_grad_norm"),
    "likelihood of what was rewarded, and of what was not": (
        "learner/likelihood_change_positive",
        "learner/likelihood_change_negative",
    ),
    "divergence from the sampling policy and the anchor": (
        "learner/behaviour_kl",
        "learner/anchor_kl",
    ),
    "share of tokens clipped, truncated, rejected, guarded": (
        r"learner/(clip|truncated|rejected|guarded)_fraction",
    ),
    "queries and words again": (
        "learner/repeated_queries",
        "learner/empty_searches",
        "learner/repetition",
    ),
    "loss": ("learner/loss", "learner/value_loss"),
}
STALE: Charts = {
    "staleness of the batch": ("replay/staleness", "replay/staleness_max"),
    "share of tokens by staleness": (r"learner/staleness_tokens_\w+",),
    "effective sample size": (
        "learner/ess",
        "learner/ess_truncated",
        "learner/current_ess",
    ),
    "behaviour ratio": ("learner/behaviour_ratio_mean", "learner/behaviour_ratio_max"),
    "mismatch on fresh tokens": ("learner/mismatch", "learner/mismatch_max"),
    "versions a rollout": ("learner/versions_per_rollout",),
    "groups dropped": (r"replay/dropped_\w+",),
}
BOTTLENECK: Charts = {
    "the learner's seconds": (
        "learner/update_s",
        "learner/wait_for_batch_s",
        "learner/wait_for_oldest_s",
    ),
    "tokens a second": ("actor/tokens_per_s", "learner/tokens_per_s"),
    "groups ready and open": ("replay/ready_groups", "replay/open_groups"),
    "rollouts in flight, of how many": ("actor/rollouts_in_flight", "actor/capacity"),
    "requests that run, and wait": ("actor/running_requests", "actor/queued_requests"),
    "use of the engines' caches": ("actor/kv_use_max", "actor/prefix_hit_rate"),
    "seconds of a search": (r"retrieval/latency_p\d+_s",),
    "seconds of new weights": (
        "sync/generation_pause_s",
        "sync/publish_s",
        "sync/broadcast_s",
    ),
}
LAYOUT: Mapping[str, Charts] = {
    "learning?": LEARNING,
    "stable?": STABLE,
    "stale?": STALE,
    "bottleneck?": BOTTLENECK,
}


def custom_scalars() -> dict[str, dict[str, list[object]]]:
    """The layout as `SummaryWriter.add_custom_scalars` takes it."""
    return {
        question: {
            title: ["Multiline", [f"{pattern}$" for pattern in patterns]]
            for title, patterns in charts.items()
        }
        for question, charts in LAYOUT.items()
    }
