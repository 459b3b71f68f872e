"""The faults that are planted in the actors."""

from scripts.mutant import Mutant

IN_ACTORS = (
    Mutant(
        "version tagged one late",
        "actors/vllm_policy.py",
        "= int(span.version)",
        "= max(0, int(span.version) - 1)",
        ("tests/actors/test_vllm_policy.py::test_spans_become_one_version_per_token",),
    ),
    Mutant(
        "answer read from a passage",
        "actors/rollout.py",
        "environment.step(completion.tokens, len(context))",
        "environment.step(context[len(prompt) :], len(context))",
        ("tests/actors/test_rollout.py::test_an_answer_in_a_passage_earns_nothing",),
    ),
    Mutant(
        "special tokens in passages",
        "actors/prompt.py",
        "self._plain if foreign else {}",
        "{}",
        ("tests/actors/test_prompt.py",),
    ),
    Mutant(
        "end token doubled",
        "actors/chat.py",
        "frame[0][1:] if ended else frame[0]",
        "frame[0]",
        ("tests/actors/test_chat.py",),
    ),
    Mutant(
        "recorded passages in the order shown",
        "actors/recorded.py",
        "in sorted(zip(order, ids, strict=True))",
        "in zip(order, ids, strict=True)",
        ("tests/actors/test_recorded.py",),
    ),
    Mutant(
        "search not on record found empty",
        "actors/recorded.py",
        "self._results.get(query)",
        "self._results.get(query, ())",
        ("tests/actors/test_recorded.py",),
    ),
    Mutant(
        "contradicting records overlooked",
        "actors/recorded.py",
        "if sorted(first) != sorted(ids):",
        "if not set(first) & set(ids):",
        ("tests/actors/test_recorded.py",),
    ),
    Mutant(
        "prompts tokenised again pass the audit",
        "actors/token_audit.py",
        "before = asked[: len(self._ids)]",
        "before = self._ids",
        ("tests/actors/test_token_audit.py",),
    ),
    Mutant(
        "an untrained stop passes the audit",
        "actors/token_audit.py",
        "return self._completes(tokens[-reach:], texts) or self._completes(tokens, texts)",
        "return True",
        ("tests/actors/test_token_audit.py",),
    ),
    Mutant(
        "unscorable taken for wrong",
        "actors/rewards.py",
        "Score(None, self._count(lease, error), parts)",
        "Score(0.0, self._count(lease, error), parts)",
        ("tests/actors/test_rewards.py",),
    ),
    Mutant(
        "observations taken for the policy's words",
        "actors/rollout.py",
        "prompter.said(turn.action_tokens, ends)",
        "prompter.decode(turn.observation_tokens)",
        ("tests/actors/test_rewards.py",),
    ),
)
