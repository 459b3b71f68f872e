"""The planted faults: each breaks a promise, and names the tests that must notice it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` stands exactly once in `file` and becomes `new`; `tests` are pytest's
    arguments.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "observation unmasked",
        "learner/packing.py",
        "row.loss_mask[action] = True",
        "row.loss_mask[start : action.stop + len(turn.observation_tokens)] = True",
        ("tests/learner/test_packing.py",),
    ),
    Mutant(
        "stop tag untrained",
        "learner/packing.py",
        "row.loss_mask[action] = True",
        "row.loss_mask[start : action.stop - 1] = True",
        ("tests/learner/test_packing.py",),
    ),
    Mutant(
        "observations of demonstrations learnt",
        "learner/imitation.py",
        "loss_mask=np.repeat([own for _, own in segments], lengths)",
        "loss_mask=np.arange(length) >= lengths[0]",
        ("tests/learner/test_imitation.py",),
    ),
    Mutant(
        "log-probs shifted by one",
        "learner/model/scorer.py",
        "tokens[:, 1:][predicts]",
        "tokens[:, :-1][predicts]",
        ("tests/learner/model/test_scorer.py",),
    ),
    Mutant(
        "behaviour ratio inverted",
        "learner/algorithm/importance.py",
        "numerator - denominator",
        "denominator - numerator",
        ("tests/learner/algorithm/test_importance.py",),
    ),
    Mutant(
        "policy ratio inverted",
        "learner/algorithm/objectives.py",
        "current_logprobs - proximal_logprobs.detach()",
        "proximal_logprobs.detach() - current_logprobs",
        ("tests/learner/algorithm/test_objectives.py",),
    ),
    Mutant(
        "EMA decay swapped",
        "learner/model/ema.py",
        "1.0 - self.decay",
        "self.decay",
        ("tests/learner/model/test_ema.py",),
    ),
    Mutant(
        "EMA in bf16",
        "learner/model/ema.py",
        "master.lerp_(weights[name].detach().float(), 1.0 - self.decay)",
        "master.lerp_(weights[name].detach().float(), 1.0 - self.decay)\n"
        "                master.copy_(master.bfloat16())",
        ("tests/learner/model/test_ema.py",),
    ),
    Mutant(
        "swap missed for one tensor",
        "learner/model/shards.py",
        "for name, weight in self._weights.items():",
        "for name, weight in list(self._weights.items())[1:]:",
        ("tests/learner/model/test_ema.py", "tests/learner/test_update.py"),
    ),
    Mutant(
        "swap missed for a part of one buffer (ZeRO 1, 2)",
        "learner/model/shards.py",
        "                part.copy_(values[name])\n                if",
        "                part[8:].copy_(values[name][8:])\n                if",
        ("tests/learner/model/test_engine.py",),
    ),
    Mutant(
        "swap missed for a part of one weight (ZeRO 3)",
        "learner/model/shards.py",
        "self._masters, self._partitions, strict=True):\n                part.copy_(values[name])",
        "self._masters, self._partitions, strict=True):\n"
        "                part[8:].copy_(values[name][8:])",
        ("tests/learner/model/test_engine.py",),
    ),
    Mutant(
        "weight applied twice",
        "learner/algorithm/loss.py",
        "losses = self.weights[chunk] * self.policy",
        "losses = self.weights[chunk].square() * self.policy",
        ("tests/learner/algorithm/test_correction.py",),
    ),
    Mutant(
        "denominator after rejection",
        "learner/update.py",
        "coefficients=tokens.coefficients,",
        "coefficients=tokens.coefficients * len(rows) / weights.ne(0.0).sum(),",
        ("tests/learner/algorithm/test_correction.py",),
    ),
    Mutant(
        "advantage uncentred",
        "learner/algorithm/advantage.py",
        "centred = scored - scored.mean()",
        "centred = scored.clone()",
        ("tests/learner/algorithm/test_advantage.py",),
    ),
    Mutant(
        "tied LM head left stale after a sync",
        "weight_sync/vllm_worker.py",
        "    _read_live_weights(model)\n    loaded",
        "    loaded",
        ("tests/weight_sync/test_vllm.py::test_the_tied_head_follows_the_embedding",),
    ),
    Mutant(
        "bytes of another digest taken and handed on",
        "weight_sync/receiver.py",
        "if self._digest != self.manifest.bytes_digest:",
        "if not self._digest:",
        ("tests/weight_sync/test_faults.py", "tests/weight_sync/test_relays.py"),
    ),
    Mutant(
        "weights sent to each actor of another node",
        "weight_sync/routes.py",
        "if node != own and node not in apart",
        "if node == own and node not in apart",
        ("tests/weight_sync/test_routes.py", "tests/weight_sync/test_relays.py"),
    ),
    Mutant(
        "admission off by one",
        "replay/ledger/admission.py",
        "admitted < allowed_groups(",
        "admitted <= allowed_groups(",
        ("tests/replay/ledger/test_ledger_leases.py", "tests/replay/ledger/test_admission.py"),
    ),
    Mutant(
        "older unfinished group passed over",
        "replay/ledger/admission.py",
        "if not can_pass(",
        "if False and not can_pass(",
        ("tests/replay/ledger/test_ledger_batches.py", "tests/replay/ledger/test_admission.py"),
    ),
    Mutant(
        "evaluation trajectory trained on",
        "replay/ledger/state.py",
        "            del self.evaluating[group.group_id]\n",
        "            del self.evaluating[group.group_id]\n"
        "            self.ready[group.group_id] = group\n"
        '            group.payloads = {i: b"" for i in range(group.size)}\n',
        ("tests/replay/ledger/test_ledger_evaluation.py",),
    ),
    Mutant(
        "resume restarts the admission counters",
        "replay/ledger/state.py",
        "max(self.last_sampled, fact.step)",
        "fact.step",
        ("tests/replay/ledger/test_ledger_restart.py",),
    ),
    Mutant(
        "evaluations number the training groups",
        "replay/ledger/leasing.py",
        "next_group_id[kind]",
        'next_group_id["train"]',
        ("tests/replay/ledger/test_ledger_evaluation.py",),
    ),
    Mutant(
        "committed before durable",
        "learner/run.py",
        "            self.save()\n            self.reader.committed(self.step)",
        "            self.reader.committed(self.step)\n            self.save()",
        ("tests/learner/test_loop.py",),
    ),
    Mutant(
        "checkpoint named before it is on disk",
        "learner/checkpoint.py",
        "making(final, replaces=True)",
        "making(final, replaces=True, durable=False)",
        ("tests/learner/test_checkpoint.py",),
    ),
    Mutant(
        "acknowledged before written",
        "replay/server/connections.py",
        "            self._unsent.append((peer, reply))",
        "            self.send(peer, reply)",
        ("tests/replay/server/test_server.py",),
    ),
    Mutant(
        "lost lease not given again",
        "replay/ledger/leasing.py",
        "        self._lease_lost_siblings(capacity)\n",
        "",
        ("tests/replay/ledger/test_ledger_failures.py",),
    ),
    Mutant(
        "trained group stays ready",
        "replay/ledger/state.py",
        "self.ready.pop(group_id) for group_id in fact",
        "self.ready[group_id] for group_id in fact",
        ("tests/replay/ledger/test_ledger_batches.py",),
    ),
    Mutant(
        "second delivery of a sibling taken",
        "replay/ledger/actors.py",
        "if message.sibling in group.summaries:",
        "if False and message.sibling in group.summaries:",
        ("tests/replay/ledger/test_ledger_batches.py",),
    ),
    Mutant(
        "older incarnation accepted",
        "replay/ledger/learner.py",
        "if incarnation < current:",
        "if incarnation < current - 1:",
        ("tests/replay/ledger/test_ledger_resume.py",),
    ),
    Mutant(
        "log: bound checked after allocation",
        "replay/log/format.py",
        '    if not length:\n        return b"", 0, "an empty record"\n',
        "    payload = file.read(length)\n    file.seek(offset + FRAME.size)\n"
        '    if not length:\n        return b"", 0, "an empty record"\n',
        (
            "tests/replay/log/test_log_fuzz.py::test_a_corrupted_length_takes_no_more_than_a_record_may",
        ),
    ),
    Mutant(
        "log: number of a record not checked",
        "replay/log/format.py",
        "if due is not None and number != due:",
        "if False and due is not None and number != due:",
        ("tests/replay/log/test_log_damage.py",),
    ),
    Mutant(
        "log: segment of another log taken for its own",
        "replay/log/format.py",
        "if segment.log not in (None, log):",
        "if False and segment.log not in (None, log):",
        ("tests/replay/log/test_segments.py",),
    ),
    Mutant(
        "environment not closed where its rollout fails",
        "actors/environments/registry.py",
        "    try:\n        yield environment\n    finally:\n        await _close(",
        "    yield environment\n    if True:\n        await _close(",
        ("tests/actors/environments/test_closing.py",),
    ),
    Mutant(
        "log: end of a closed segment taken for torn",
        "replay/log/format.py",
        "and torn and not segment.closed",
        "and torn",
        ("tests/replay/log/test_segments.py",),
    ),
    Mutant(
        "log: segment named before it is on disk",
        "replay/log/segments.py",
        "        with replacing(final) as draft:\n",
        "        with replacing(final, durable=False) as draft:\n",
        ("tests/replay/log/test_segments.py",),
    ),
    Mutant(
        "compaction takes what is not committed",
        "replay/log/compaction.py",
        "if step <= fact.step]",
        "if step <= fact.step + 1]",
        ("tests/replay/log/test_compaction.py",),
    ),
    Mutant(
        "version tagged one late",
        "actors/policies/vllm.py",
        "= int(span.version)",
        "= max(0, int(span.version) - 1)",
        ("tests/actors/policies/test_vllm.py::test_spans_become_one_version_per_token",),
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
        "actors/environments/chat.py",
        "frame[0][1:] if ended else frame[0]",
        "frame[0]",
        ("tests/actors/environments/test_chat.py",),
    ),
    Mutant(
        "batch not bounded by time",
        "retrieval_server/app/queue.py",
        "return batch_size(self._fit.pace, self._deadline_s, self._max_batch)",
        "return self._max_batch",
        ("tests/retrieval_server/app/test_queue.py",),
    ),
    Mutant(
        "search let in that will be late",
        "retrieval_server/app/queue.py",
        "if too_late_s > 0.0:",
        "if too_late_s > 60.0:",
        ("tests/retrieval_server/app/test_queue.py",),
    ),
    Mutant(
        "recorded passages in the order shown",
        "actors/retrieval.py",
        "in sorted(zip(order, ids, strict=True))",
        "in zip(order, ids, strict=True)",
        ("tests/actors/test_retrieval.py",),
    ),
    Mutant(
        "search not on record found empty",
        "actors/retrieval.py",
        "self._results.get(query)",
        "self._results.get(query, ())",
        ("tests/actors/test_retrieval.py",),
    ),
    Mutant(
        "contradicting records overlooked",
        "actors/retrieval.py",
        "if sorted(first) != sorted(ids):",
        "if not set(first) & set(ids):",
        ("tests/actors/test_retrieval.py",),
    ),
    Mutant(
        "prompts tokenised again pass the audit",
        "actors/token_audit.py",
        "before = asked[: len(self._ids)]",
        "before = self._ids",
        ("tests/actors/test_token_audit.py",),
    ),
    Mutant(
        "the role of a key not checked",
        "replay/server/server.py",
        "if role == ACTOR and not isinstance(request, wire.WithActorKey):",
        "if False:",
        ("tests/replay/server/test_roles.py",),
    ),
    Mutant(
        "a version beyond the run taken for true",
        "replay/ledger/bounds.py",
        "if stated.policy_version > state.last_sampled:",
        "if False:",
        ("tests/replay/ledger/test_bounds.py",),
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
        "actors/rewards/scorer.py",
        "Score(None, self._count(lease, error), parts)",
        "Score(0.0, self._count(lease, error), parts)",
        ("tests/actors/rewards/test_scorer.py",),
    ),
    Mutant(
        "observations taken for the policy's words",
        "actors/rollout.py",
        "prompter.said(turn.action_tokens, ends)",
        "prompter.decode(turn.observation_tokens)",
        ("tests/actors/rewards/test_scorer.py",),
    ),
    Mutant(
        "trust taken from a record",
        "scripts/setup/model_source.py",
        "source=str(record), trust=trusted",
        "source=str(record), trust=config.model.trust_remote_code",
        ("tests/scripts/setup/test_model_source.py",),
    ),
    Mutant(
        "trust taken from replay",
        "actors/joining.py",
        "trust=trusted, given",
        "trust=config.model.trust_remote_code, given",
        ("tests/actors/test_joining.py",),
    ),
)
