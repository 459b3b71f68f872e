"""Planted faults: `make mutants` shows that the tests notice each of them.

Copies the tree, checks that each fault's named tests are green without it, plants the fault, and
runs only those tests again: at least one must turn red. Exit code 1 when a fault survives or a test
was red before.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 300


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
        "log-probs shifted by one",
        "learner/model.py",
        "tokens[:, 1:][predicts]",
        "tokens[:, :-1][predicts]",
        ("tests/learner/test_model.py",),
    ),
    Mutant(
        "behaviour ratio inverted",
        "learner/importance.py",
        "numerator - denominator",
        "denominator - numerator",
        ("tests/learner/test_importance.py",),
    ),
    Mutant(
        "policy ratio inverted",
        "learner/objectives/base.py",
        "current_logprobs - proximal_logprobs.detach()",
        "proximal_logprobs.detach() - current_logprobs",
        ("tests/learner/objectives/test_grpo.py",),
    ),
    Mutant(
        "EMA decay swapped",
        "learner/ema.py",
        "1.0 - self.decay",
        "self.decay",
        ("tests/learner/test_ema.py",),
    ),
    Mutant(
        "EMA in bf16",
        "learner/ema.py",
        "master.lerp_(weights[name].detach().float(), 1.0 - self.decay)",
        "master.lerp_(weights[name].detach().float(), 1.0 - self.decay)\n"
        "            master.copy_(master.bfloat16())",
        ("tests/learner/test_ema.py",),
    ),
    Mutant(
        "swap missed for one tensor",
        "learner/shards.py",
        "for name, weight in self._weights.items():\n            weight.copy_(values[name])",
        "for name, weight in list(self._weights.items())[1:]:\n"
        "            weight.copy_(values[name])",
        ("tests/learner/test_ema.py", "tests/learner/test_update.py"),
    ),
    Mutant(
        "swap missed for a part of one buffer (ZeRO 1, 2)",
        "learner/shards.py",
        "            part.copy_(values[name])\n            if",
        "            part[8:].copy_(values[name][8:])\n            if",
        ("tests/learner/test_engine.py",),
    ),
    Mutant(
        "swap missed for a part of one weight (ZeRO 3)",
        "learner/shards.py",
        "self._masters, self._partitions, strict=True):\n            part.copy_(values[name])",
        "self._masters, self._partitions, strict=True):\n"
        "            part[8:].copy_(values[name][8:])",
        ("tests/learner/test_engine.py",),
    ),
    Mutant(
        "weight applied twice",
        "learner/loss.py",
        "losses = self.weights[chunk] * self.policy",
        "losses = self.weights[chunk].square() * self.policy",
        ("tests/learner/test_correction.py",),
    ),
    Mutant(
        "denominator after rejection",
        "learner/update.py",
        "coefficients=micro.coefficients[rows],",
        "coefficients=micro.coefficients[rows] * len(rows) / weights.ne(0.0).sum(),",
        ("tests/learner/test_correction.py",),
    ),
    Mutant(
        "advantage uncentred",
        "learner/advantage.py",
        "centred = scored - scored.mean()",
        "centred = scored.clone()",
        ("tests/learner/test_advantage.py",),
    ),
    Mutant(
        "tied LM head left stale after a sync",
        "weight_sync/vllm_worker.py",
        "    _read_live_weights(model)\n    loaded",
        "    loaded",
        ("tests/weight_sync/test_vllm.py::test_the_tied_head_follows_the_embedding",),
    ),
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
        "admission off by one",
        "replay/admission.py",
        "standing < allowed_groups(",
        "standing <= allowed_groups(",
        ("tests/replay/ledger/test_ledger_leases.py", "tests/replay/test_admission.py"),
    ),
    Mutant(
        "older unfinished group passed over",
        "replay/admission.py",
        "if not can_pass(",
        "if False and not can_pass(",
        ("tests/replay/ledger/test_ledger_batches.py", "tests/replay/test_admission.py"),
    ),
    Mutant(
        "evaluation trajectory trained on",
        "replay/books.py",
        "            del self.evaluating[group.group_id]\n",
        "            del self.evaluating[group.group_id]\n"
        "            self.ready[group.group_id] = group\n"
        '            group.payloads = {i: b"" for i in range(group.size)}\n',
        ("tests/replay/ledger/test_ledger_evaluation.py",),
    ),
    Mutant(
        "resume restarts the admission counters",
        "replay/books.py",
        "max(self.last_sampled, fact.step)",
        "fact.step",
        ("tests/replay/ledger/test_ledger_restart.py",),
    ),
    Mutant(
        "evaluations number the training groups",
        "replay/leasing.py",
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
        "    _sync_tree(writing)\n",
        "",
        ("tests/learner/test_checkpoint.py",),
    ),
    Mutant(
        "acknowledged before written",
        "replay/server.py",
        "                    self._outbox.append((peer, reply))",
        "                    self._send(peer, reply)",
        ("tests/replay/test_server.py",),
    ),
)


def plant(tree: Path, mutant: Mutant) -> str:
    """Apply the fault to a tree; returns the original text. Raises ValueError if `old` is not
    unique.
    """
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {text.count(mutant.old)} places in {mutant.file} match")
    path.write_text(text.replace(mutant.old, mutant.new))
    return text


def red(tree: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """Whether these tests fail in the tree, and the end of their output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode not in (0, 1):  # not a verdict: nothing collected, wrong usage
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {done.returncode}:\n{done.stdout}")
    return done.returncode == 1, done.stdout[-2000:]


def copy_tree(target: Path) -> Path:
    """Copy what git knows (and new files it does not ignore)."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def main() -> int:
    """Plant every fault in turn and print a table."""
    parser = argparse.ArgumentParser(description="Show that the tests notice planted faults.")
    parser.add_argument("names", nargs="*", help="only these faults")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.names or m.name in arguments.names]
    if unknown := set(arguments.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no fault is called {min(unknown)!r}")
    survivors = []
    with tempfile.TemporaryDirectory(prefix="forage-mutants-") as folder:
        tree = copy_tree(Path(folder))
        every = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        begun = time.monotonic()
        print(f"unchanged tree: {len(every)} named tests ...", end=" ", flush=True)
        failed, output = red(tree, every)
        print("red" if failed else "green", f"({time.monotonic() - begun:.0f} s)")
        if failed:
            print(output)
            return 1
        for mutant in chosen:
            begun = time.monotonic()
            print(f"{mutant.name:.<58}", end=" ", flush=True)
            original = plant(tree, mutant)
            caught, _ = red(tree, mutant.tests)
            (tree / mutant.file).write_text(original)
            print("caught" if caught else "SURVIVED", f"({time.monotonic() - begun:.0f} s)")
            survivors += [] if caught else [mutant.name]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
