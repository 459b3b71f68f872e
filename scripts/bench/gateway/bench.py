"""The gateway against vLLM's own server: `forage bench gateway [--quick]`.

Both serve the demo's model, deepened so that a token costs something, each in a process of its own
on the same machine. The same calls are made of both in turns; each window of ours is judged by the
mean of those of vLLM's before and after it.
"""

import asyncio
import socket
import statistics
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actors.gateway.server import HOST
from actors.policies.engine import prepare_environment
from configs.load import load
from configs.runtime.process import REPOSITORY
from configs.schema import Config
from scripts.bench import harness
from scripts.bench.gateway.calls import Window, window
from scripts.bench.gateway.serving import Address, command_of_vllm
from scripts.bench.overlap.task import prepare_model, questions
from scripts.demo.task import prepare

SESSIONS, LAYERS, SEED = 64, 8, 0
MAX_TOKENS = 20  # the demo's actors.max_action_tokens
START_S = 600.0
CONFIG = REPOSITORY / "configs" / "demo.yaml"
GOALS = {
    "tokens_over_vllm_server": harness.at_least(0.9),
    "added_p50_ms": harness.at_most(5.0),
    "merged_whole": harness.at_least(1.0),
    "sampled_differs": harness.at_most(0.05),
    "errors": harness.at_most(0),
}
METHOD = {
    "tokens_over_vllm_server": "sampled tokens/s through the gateway over those of vLLM's server, "
    "64 sessions of up to three text completions at once; the median over windows",
    "added_p50_ms": "the median latency of a call with one session, less that of vLLM's server",
    "merged_whole": "share of the gateway's sessions of two turns or more whose every prompt goes "
    "on, id for id, from what was read and sampled before",
    "sampled_differs": "by what share a call through the gateway samples more or fewer tokens than "
    "one of vLLM's server, in the mean over windows of 64 sessions",
    "errors": "replies of either server that were no 200",
}


@dataclass(frozen=True)
class BenchGatewayOptions(harness.BenchOptions):
    """Options of `forage bench gateway`; `quick`: fewer and shorter windows."""


class Sizes(NamedTuple):
    """The sessions of a window, those of one with a single session at a time, and the windows."""

    crowd: int
    alone: int
    repeats: int


def bench(options: BenchGatewayOptions) -> None:
    """Measure, print, write the JSON. Raises BenchError."""
    report = harness.reporter()
    sizes = Sizes(192, 20, 2) if options.quick else Sizes(640, 60, 5)
    found: dict[str, Any] = {"machine": harness.machine(), "method": METHOD, "sessions": SESSIONS}
    found |= measure(sizes, report)
    names = (
        *("tokens_over_vllm_server", "added_p50_ms", "sessions", "merged_whole"),
        *("sampled_differs", "errors"),
    )
    harness.finish(options, found, [harness.goals_table(found, GOALS, names, "the gateway")])


def measure(sizes: Sizes, report: harness.Report) -> dict[str, Any]:
    """The figures of both servers. Raises BenchError."""
    files = prepare(REPOSITORY / ".cache", SEED, report)
    model = prepare_model(files.model, LAYERS, report)
    overrides = [f"model.path={model}", f"actors.max_num_seqs={SESSIONS}", "actors.threads=1"]
    config = load(CONFIG, overrides)
    prepare_environment(config)  # of both servers
    with harness.scratch() as folder, _servers(config, overrides, folder, report) as both:
        return asyncio.run(_figures(*both, sizes, report))


@contextmanager
def _servers(
    config: Config, overrides: list[str], folder: Path, report: harness.Report
) -> Iterator[tuple[Address, Address]]:
    """Ours and vLLM's, once both serve."""
    file, port = folder / "address.json", _free_port()
    theirs = Address(f"http://{HOST}:{port}/v1", [""])
    ours = ("-m", "scripts.bench.gateway.serving", str(CONFIG), str(file), str(SESSIONS))
    with harness.Processes(folder) as processes:
        report("starting the gateway's engine")
        processes.start("gateway", *ours, *overrides)
        processes.wait([], START_S, file.exists)
        report("starting vLLM's server")
        processes.start("vllm", *command_of_vllm(config, port))
        processes.wait([], START_S, lambda: _answers(theirs.url))
        yield msgspec.json.decode(file.read_bytes(), type=Address), theirs


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/models", timeout=5) as reply:
        return bool(reply.status == 200)
    return False


async def _figures(
    ours: Address, theirs: Address, sizes: Sizes, report: harness.Report
) -> dict[str, Any]:
    play = _Played([question.text for question in questions(SEED)]).window
    looked = await play(ours, SESSIONS, SESSIONS, look=True)  # warms up, too
    if not looked.whole:
        raise harness.BenchError("no session had a second turn: nothing tells whether calls merge")
    windows = [looked, await play(theirs, SESSIONS, SESSIONS)]
    ratios, added = list[float](), list[float]()
    crowds: tuple[list[Window], list[Window]] = [], []  # ours, theirs
    before = await play(theirs, SESSIONS, sizes.crowd)
    for _ in range(sizes.repeats):
        mine, after = [await play(each, SESSIONS, sizes.crowd) for each in (ours, theirs)]
        ratios.append(_rate(mine) / statistics.fmean([_rate(before), _rate(after)]))
        alone = [await play(each, 1, sizes.alone) for each in (theirs, ours, theirs)]
        first, own, last = (1000 * statistics.median(each.latencies_s) for each in alone)
        added.append(own - (first + last) / 2)
        report(
            f"{_rate(mine):,.0f} tokens/s, {_rate(before):,.0f} and {_rate(after):,.0f} of vLLM's; "
            f"alone {own:.1f} ms a call, {first:.1f} and {last:.1f}"
        )
        windows += [before, mine, *alone]
        crowds[0].append(mine)
        crowds[1].append(after)
        before = after
    sampled, of_vllm = map(_sampled, crowds)
    return {
        "tokens_over_vllm_server": statistics.median(ratios),
        "added_p50_ms": statistics.median(added),
        "merged_whole": statistics.fmean(looked.whole),
        "sampled_differs": abs(sampled / of_vllm - 1.0),
        "tokens_per_call": {"gateway": sampled, "vllm": of_vllm},
        "errors": sum(each.errors for each in [*windows, before]),
        "windows": {"ratios": ratios, "added_ms": added},
    }


@dataclass
class _Played:
    """Windows of sessions, no two alike."""

    texts: list[str]
    begun: int = 0

    async def window(
        self, address: Address, at_once: int, count: int, look: bool = False
    ) -> Window:
        """Play so many sessions of a server."""
        first, self.begun = self.begun, self.begun + count
        return await window(
            address,
            self.texts,
            at_once=at_once,
            sessions=count,
            max_tokens=MAX_TOKENS,
            first=first,
            look=look,
        )


def _sampled(windows: Sequence[Window]) -> float:
    """The mean count of tokens of a call."""
    return sum(each.tokens for each in windows) / sum(len(each.latencies_s) for each in windows)


def _rate(of: Window) -> float:
    return of.tokens / of.seconds
