"""Keys of a run, on real sockets: its own are let in, others are refused and named in the log."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from configs.keys import ACTOR, LEARNER, Addresses, Keys
from configs.load import ConfigError
from configs.schema import Config, LearnerConfig, ReplayConfig


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "run" / "keys").make()


@pytest.fixture
def ask(keys: Keys) -> Iterator[Callable[..., bytes | None]]:
    """ask(keys): what a guarded socket hears of somebody who has these keys."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    guard = keys.guard(context, socket)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def asking(theirs: Keys | None, role: str = ACTOR) -> bytes | None:
        other: zmq.Context[Any] = zmq.Context()
        dealer = other.socket(zmq.DEALER)
        if theirs:
            theirs.present(dealer, role)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        heard = socket.recv_multipart()[1] if socket.poll(2000 if theirs is keys else 500) else None
        other.destroy(linger=0)
        return heard

    yield asking
    guard.close()
    socket.close(linger=0)
    context.term()


def mixed(keys: Keys, folder: Path) -> Keys:
    """Another run's client pair beside this run's public key."""
    other = Keys(folder).make()
    (folder / "server.key").write_bytes((keys.folder / "server.key").read_bytes())
    return other


def test_the_run_s_own_key_is_let_in(ask: Callable[..., bytes | None], keys: Keys) -> None:
    assert ask(keys) == ask(keys, LEARNER) == b"hello"


def test_discarded_keys_are_drawn_anew_and_links_are_not_followed(
    keys: Keys, tmp_path: Path
) -> None:
    old = keys.proof()
    assert keys.discard() and not keys.discard()
    assert keys.make().proof() != old
    kept = keys.folder.rename(tmp_path / "kept")
    keys.folder.symlink_to(kept)
    assert keys.discard() and not keys.folder.is_symlink()
    assert (kept / "server.key_secret").exists()


def test_no_key_and_other_keys_are_refused_by_name(
    ask: Callable[..., bytes | None], keys: Keys, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING)
    assert ask(None) is None
    assert ask(Keys(tmp_path / "other").make()) is None
    assert "does not speak CurveZMQ with our key" in caplog.text
    assert ask(mixed(keys, tmp_path / "mixed")) is None
    assert "its key is not this run's" in caplog.text
    assert ask(keys) == b"hello", "the others are not disturbed"


def test_the_keys_are_made_once_and_for_their_owner_alone(keys: Keys) -> None:
    before = {path.name: path.read_bytes() for path in keys.folder.iterdir()}
    keys.make()
    assert before == {path.name: path.read_bytes() for path in keys.folder.iterdir()}
    pairs = ("server", "actor", "learner")
    assert set(before) == {f"{name}.key{end}" for name in pairs for end in ("", "_secret")}
    assert keys.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in keys.folder.iterdir()} == {0o600}
    assert [path.name for path in keys.folder.parent.iterdir()] == ["keys"]


def test_missing_keys_are_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys = .*none'.*start replay first, or copy the keys"):
        Keys(tmp_path / "none").check(ACTOR)


def test_a_copy_that_others_can_read_is_named(keys: Keys) -> None:
    (keys.folder / "actor.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"actor.key_secret has mode 0644, .*: chmod 600 /"):
        keys.check(ACTOR)


def test_a_proof_is_of_what_was_said_and_of_the_keys(keys: Keys, tmp_path: Path) -> None:
    proof = keys.proof(b"joins", b"1" * 32)
    assert proof == Keys(keys.folder).proof(b"joins", b"1" * 32) and len(proof) == 32
    others = Keys(tmp_path / "others").make()
    assert len({proof, keys.proof(b"leads", b"1" * 32), others.proof(b"joins", b"1" * 32)}) == 3


def test_only_tcp_needs_keys(tmp_path: Path) -> None:
    there = ReplayConfig(endpoint="tcp://127.0.0.1:5555")
    found = Addresses.of(Config(run_dir=str(tmp_path), replay=there))
    assert found.weight_sync.keys is None and found.replay.endpoint == there.endpoint
    assert found.keys is found.replay.keys and found.keys and found.keys.folder == tmp_path / "keys"
    assert Addresses.of(Config(run_dir=str(tmp_path))).keys is None
    meet = Addresses.of(Config(learner=LearnerConfig(rendezvous="tcp://10.0.0.1:4000")))
    assert meet.keys is meet.rendezvous.keys and meet.keys


def test_sockets_lie_in_the_run_s_own_short_directory(tmp_path: Path) -> None:
    one, two = (
        Addresses.of(Config(run_dir=str(tmp_path / name))).replay.endpoint for name in ("a", "b")
    )
    assert one.startswith("ipc:///tmp/forage-") and one != two and len(one) < 100
