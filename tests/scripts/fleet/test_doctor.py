"""The command `forage doctor`, of this machine and of a cluster's nodes."""

import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from configs.runtime.process import REPOSITORY
from scripts import cli
from scripts.fleet import doctor as command
from scripts.fleet import examiner
from scripts.fleet.nodes import Facts, Node, Surveyed
from scripts.setup import doctor
from scripts.setup.doctor import Finding

GIB = 1 << 30
FACTS = Facts(
    versions={"Python": "3.12.1", "vllm": "1.0", "forage": "1 (ab)"},
    python_path="/forage",
    sizes={},
    cores=96,
    memory_bytes=900 * GIB,
    gpu_bytes=(80 * GIB,) * 8,
    tmp_bytes=GIB,
    shm_bytes=GIB,
    ports=(20_000,),
    run_dir="",
    shared="",
)


def node(name: str, ahead_s: float = 0.0, **versions: str) -> Surveyed:
    facts = msgspec.structs.replace(FACTS, versions=FACTS.versions | versions)
    return Surveyed(Node(name, "", 8, 96.0), facts, ahead_s, 0.1)


def bad(found: list[Finding]) -> dict[str, str]:
    return {each.what: each.remedy for each in found if not each.ok}


def test_a_node_shows_what_it_has_and_each_shortcoming_with_its_remedy() -> None:
    few = Finding("cores", "1", ">= 2", False, "more")
    whole, less = command.of_node(node("a"), [few, replace(few, what="files", ok=True)])
    assert whole.has == "8 GPUs, 96 cores, 900 GiB free, 1 of 2 checks"
    assert not whole.ok and not whole.required
    assert (less.what, less.remedy, less.problems) == ("a: cores", "more", 1)
    assert [each.ok for each in command.of_node(node("a"), [])] == [True]


def test_gpus_that_ray_was_not_told_of_are_said() -> None:
    there = node("a")
    less = msgspec.structs.replace(there, node=Node("a", "", 6, 96.0))
    assert "--num-gpus=8" in bad(list(command.of_node(less, [])))["a: GPUs of Ray"]


def test_a_node_that_cannot_be_looked_at_is_named_with_the_reason() -> None:
    (row,) = command.lost({Node("a", "h", 0, 1.0): "node a (h): no module named 'scripts'"}, [])
    assert row.what == "a (h)" and row.problems == 1
    assert row.remedy.startswith("no module named 'scripts': see that it is up, with Forage")


def test_storage_is_seen_by_all_or_those_that_do_not_are_named() -> None:
    blind = msgspec.structs.replace(FACTS, shared="it has no locks (ENOSYS)")
    nodes = [node("a"), node("b"), Surveyed(Node("c", "", 8, 96.0), blind)]
    assert not list(command.storage("", nodes, {}))
    (whole,) = command.storage("/shared", nodes[:2], {"a": True, "b": True})
    assert whole.ok and whole.needs == "/shared"
    found = bad(list(command.storage("/shared", nodes, {"a": True, "b": False, "c": False})))
    assert list(found) == ["b: shared storage", "c: shared storage"]
    assert "does not come here" in found["b: shared storage"]
    assert "has no locks (ENOSYS): mount" in found["c: shared storage"]


def test_versions_are_those_of_the_first_node() -> None:
    assert not bad(list(command.versions([node("a"), node("b")])))
    found = bad(list(command.versions([node("a"), node("b", vllm="0.9"), node("c", forage="")])))
    assert list(found) == ["b: vllm", "c: forage"]
    assert "install vllm 1.0 there" in found["b: vllm"] and "source" in found["c: forage"]


def test_any_two_clocks_may_differ_by_a_second() -> None:
    (whole,) = command.clocks([node("a"), node("b", -0.3), node("c", 0.7)])
    assert (whole.ok, whole.has) == (True, "1.00 s apart")
    (far,) = command.clocks([node("a"), node("b", -0.8), node("c", 0.8)])
    assert (far.what, far.has) == ("b and c: clocks", "-0.80 s and +0.80 s")
    assert far.problems == 1 and "1.60 s apart" in far.remedy and "NTP" in far.remedy


def test_each_pair_without_a_connection_is_named() -> None:
    assert not bad(list(command.reach({})))
    found = bad(list(command.reach({("a", "b"): {20_001: "timed out"}})))
    assert list(found) == ["a to b: TCP"] and "firewall" in found["a to b: TCP"]


def test_a_slow_network_is_said_and_hinders_nothing() -> None:
    rates = {("a", "b"): 12.5e6, ("b", "a"): 1.25e9}
    slow, fast = command.bandwidths(rates)
    assert (slow.has, slow.ok, slow.problems) == ("0.1 Gbit/s", False, 0)
    assert (fast.has, fast.ok) == ("10.0 Gbit/s", True)


def test_bandwidth_is_what_arrives() -> None:
    there = examiner.Examiner("127.0.0.1")
    assert there.rate(("127.0.0.1", there.receive()), 0.05) > 1e7


def test_no_bandwidth_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
    assert examiner.rate(place, 0.05) == 0.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2"], "--nodes 2 needs --cluster: say --cluster auto too"),
        (["--shared", "/shared"], "set cluster.address"),
        (["--cluster", "127.0.0.1:1"], "127.0.0.1:1 cannot be reached (Connection refused)"),
        (["--cluster", "127.0.0.1:x"], "is no Ray cluster: give 'auto', or HOST:PORT"),
        (["configs/demo.yaml", "--cluster", "x"], "is no Ray cluster: give 'auto', or HOST:PORT"),
        (["configs/demo.yaml", "cluster.address=x"], "is no Ray cluster: give 'auto', or HOST:"),
    ],
)
def test_a_cluster_that_cannot_be_asked_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_command_fails_where_something_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "LIBRARIES", {"msgspec": "to load"})
    file = tmp_path / "findings.json"
    config = str(REPOSITORY / "configs" / "base.yaml")
    code = cli.main(["doctor", config, f"run_dir={tmp_path / 'run'}", "--json", str(file)])
    said = " ".join(capsys.readouterr().out.split())
    assert code == 1 and "no configuration: model.path is empty" in said
    assert re.search(r"configuration \d problems no problem", said)  # one more where memory lacks
    assert re.search(r"\d problems: a run cannot", said)
    found = {each["what"]: each for each in json.loads(file.read_text())}
    assert found["msgspec"]["ok"] and not found["configuration"]["ok"]


def test_an_unknown_configuration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "none.yaml"]) == 2
    assert "'none.yaml' does not exist" in capsys.readouterr().err
