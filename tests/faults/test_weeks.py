"""The soak in two halves: what is reckoned of growth, when what is due, what breaks a promise, and
attacks on a server that lets nobody stay.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from uuid import uuid4

import msgspec
import pytest

from tests.faults import pressure
from tests.faults.census import Census, Growth, Sample, Stretch, growth, name_of
from tests.faults.pressure import Pressure, Target, askers_for
from tests.faults.victims import KINDS
from tests.faults.weeks import JUDGED, Half, Times, main

OVER = Stretch(1000.0, 2200.0)


def grown(name: str, first: int, last: int, descriptors: tuple[int, int] = (30, 32)) -> Growth:
    """Of a process that held more for a while in the last tenth."""
    return Growth(name, 7, (first, 2 * last), (first, last), descriptors)


WELL = Half(
    minutes=30.0,
    kills=dict.fromkeys(KINDS, 1),
    pressure={
        "overload/refused": 9,
        "overload/answered": 9,
        "loris/head/let go": 9,
        "loris/body/let go": 9,
        "strangers/replay/let go": 9,
        "strangers/weight_sync/let go": 9,
    },
    snapshots=3,
    saved=(5, 10),
    growths=tuple(grown(name, 1000, 1019) for name in JUDGED),
    left=(),
)


def samples(sizes: dict[float, int]) -> list[Sample]:
    return [Sample(at_s, size, size // 10) for at_s, size in sizes.items()]


def test_growth_is_from_the_least_of_the_first_tenth_to_that_of_the_last() -> None:
    first = {990.0: 1, 1000.0: 100, 1050.0: 900, 1119.0: 100}
    found = growth("replay", 7, samples(first | {1121.0: 5000, 2081.0: 130, 2200.0: 110}), OVER)
    assert found is not None
    assert found.held == (100, 5000, 120) and found.median_rise == pytest.approx(0.2)
    assert found.least == (100, 5000, 110) and found.rise == pytest.approx(0.1)
    assert found.more == 10
    assert found.descriptors == (10, 500, 11) and found.further == 1


@pytest.mark.parametrize("at_s", [[1121.0, 2200.0], [1000.0, 2079.0], []])
def test_who_was_not_there_all_the_time_is_not_judged(at_s: list[float]) -> None:
    assert growth("replay", 7, samples(dict.fromkeys(at_s, 100)), OVER) is None


def test_half_an_hour_has_five_minutes_of_kills_and_twenty_that_are_judged() -> None:
    times = Times(30.0)
    assert (times.last_blow_s, times.judged_s, times.end_s) == (300.0, 600.0, 1800.0)


@pytest.mark.parametrize(
    ("command", "parent", "name"),
    [
        (b"/usr/bin/python3\0-m\0scripts.cli\0train", 1, "scripts.cli"),
        (b"/x/raylet/raylet\0--a=b/c", 5, "raylet"),
        (b"ray::Host.start", 9, "ray::Host.start"),
        (b"VLLM::EngineCore", 6, "actor-0: engine"),
        (b"python\0-c\0from multiprocessing.resource_tracker import main", 6, "actor-0: from"),
        (b"python\0-u\0x/compile.py", 7, "learner: compile.py"),
        (b"python\0-m\0learner.worker", 9, "learner.worker"),
    ],
)
def test_a_process_has_the_name_of_its_member_or_of_its_program(
    command: bytes, parent: int, name: str
) -> None:
    members = {5: "launcher", 6: "actor-0", 7: "learner"}
    assert name_of(10, command, parent, members) == name
    assert name_of(6, command, parent, members) == "actor-0"


def test_a_half_in_which_all_went_well_breaks_no_promise() -> None:
    assert WELL.broken == []
    assert msgspec.json.decode(msgspec.json.encode(WELL), type=Half) == WELL


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"left": ("python -m replay.worker",)}, "python -m replay.worker outlived the run"),
        ({"kills": {}}, "no learner was killed"),
        ({"saved": (5, 5)}, "nothing was trained after step 5"),
        ({"snapshots": 0}, "never: a snapshot"),
        ({"pressure": {}}, "never: overload/refused"),
        ({"pressure": {"loris/head/held": 2}}, "2 × loris/head/held"),
        ({"pressure": {"strangers/replay/answered": 1}}, "1 × strangers/replay/answered"),
        ({"growths": ()}, "replay did not live through what is judged"),
        ({"growths": (grown("x", 1000, 1021),)}, "memory of x (7) rose by 2.1%"),
        (
            {"growths": (grown("replay", 9, 10),)},
            "memory of replay (7) rose by 11.1%",
        ),
        (
            {"growths": (grown("raylet", 11 << 20, (12 << 20) + 1),)},
            "memory of raylet (7) rose by 9.1%",
        ),
        ({"growths": (grown("x", 1000, 1000, (3, 12)),)}, "x (7) has 9 more descriptors"),
    ],
)
def test_each_broken_promise_is_named(change: dict[str, object], said: str) -> None:
    assert said in msgspec.structs.replace(WELL, **change).broken


def test_a_process_of_ray_may_hold_a_megabyte_more() -> None:
    raylet = grown("raylet", 11 << 20, 12 << 20)
    assert msgspec.structs.replace(WELL, growths=(*WELL.growths, raylet)).broken == []


def test_the_second_half_needs_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--half=2", f"--out={tmp_path}"]) == 2
    assert "half-1.json is not there: begin with --half 1" in capsys.readouterr().err
    for number in (1, 2):
        (tmp_path / f"half-{number}.json").write_bytes(msgspec.json.encode(WELL))
    assert main(["--half=2", f"--out={tmp_path}"]) == 2
    assert "this half has been" in capsys.readouterr().err


def test_askers_ask_for_several_times_what_is_searched_in_time() -> None:
    assert [askers_for(rate) for rate in (10.0, 2560.0, 1e6)] == [4, 40, 64]


def test_a_census_finds_who_carries_the_mark(tmp_path: Path) -> None:
    mark = uuid4().hex
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    environment = {**os.environ, "OF_A_TEST": mark}
    with Popen(command, stdin=PIPE, stdout=PIPE, env=environment) as child:
        assert child.stdout is not None
        child.stdout.readline()  # of one that has just started little is in memory yet
        census = Census(f"OF_A_TEST={mark}", tmp_path, child.pid)
        begun_s = time.time()
        census.look(begun_s)
        census.look(begun_s + 10.0)
        [found] = census.over(Stretch(begun_s, begun_s + 10.0))
    assert (found.name, found.pid) == ("launcher", child.pid)
    assert found.held[0] > 1 << 20 and found.descriptors[0] >= 3


@contextmanager
def server(stays_s: float) -> Iterator[int]:
    """One that lets each connection stay for so long, and says nothing; its port."""
    port: list[int] = []
    up, over = threading.Event(), threading.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.sleep(stays_s)
        finally:
            writer.transport.abort()

    async def main() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            port.append(listening.sockets[0].getsockname()[1])
            up.set()
            while not over.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    up.wait()
    yield port[0]
    over.set()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stays_s", "patience_s", "end"), [(0.1, 8.0, "let go"), (60.0, 0.2, "held")]
)
def test_who_is_let_go_and_who_is_held_is_counted(
    stays_s: float, patience_s: float, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("HEADERS_S", 0.1), ("HANDSHAKE_S", 0.1), ("PATIENCE_S", patience_s)):
        monkeypatch.setattr(pressure, name, value)
    monkeypatch.setattr(pressure, "PAUSE_S", 0.05)
    with server(stays_s) as port:
        here = ("127.0.0.1", port)
        with Pressure(Target(here, "t", 0.1, ["who?"], {"replay": here})) as pressing:
            ends = [f"{kind}/{end}" for kind in ("loris/head", "loris/body", "strangers/replay")]
            deadline_s = time.monotonic() + 10.0
            while not all(pressing.counts[name] for name in ends):
                assert time.monotonic() < deadline_s, dict(pressing.counts)
                time.sleep(0.02)
    other = "held" if end == "let go" else "let go"
    assert not any(name.endswith(f"/{other}") for name in pressing.counts)
