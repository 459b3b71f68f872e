"""The check of this machine: each finding, and the command."""

import re
import resource
from importlib import metadata
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from configs.load import load
from configs.runtime.process import REPOSITORY
from scripts.setup import doctor, machine
from scripts.setup.doctor import GIB, Finding


@pytest.mark.parametrize(
    ("version", "ok"), [((3, 10), False), ((3, 11), True), ((3, 14), True), ((3, 15), False)]
)
def test_python_has_a_range(version: tuple[int, int], ok: bool) -> None:
    assert doctor.python(version).ok is ok


def test_packages_are_compared_with_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "cpu.lock"
    locked = ("ray==2.0 --hash=sha256:f0", "torch==1.0", "none==1.0", "no==1; python_version < '3'")
    lock.write_text("\n".join(("# a comment", *locked)))

    def version_of(name: str) -> str:
        if name == "none":
            raise metadata.PackageNotFoundError
        return {"ray": "1.9", "torch": "1.0+cpu"}[name]

    found = doctor.packages(lock, version_of)
    assert (found.has, found.ok, found.required) == ("1 missing, 1 other", False, True)
    assert found.remedy.endswith(": none, ray 1.9")


@pytest.mark.parametrize("name", ["build", "cpu", "dev", "gpu"])
def test_every_locked_package_has_the_digests_of_its_files(name: str) -> None:
    lines = (REPOSITORY / "requirements" / f"{name}.lock").read_text().splitlines()
    locked = re.compile(r"[\w.-]+==[\w.+]+(; [^#]+?)?( --hash=sha256:[0-9a-f]{64})+")
    packages = [line for line in lines if not line.startswith("#")]
    assert packages and not [line for line in packages if not locked.fullmatch(line)]


def test_what_is_locked_is_installed_by_its_digest() -> None:
    lines = (REPOSITORY / "requirements" / "install.sh").read_text().splitlines()
    assert any(line.startswith("locked=(--no-deps --require-hashes)") for line in lines)
    installing = [line for line in lines if " -r " in line]
    assert len(installing) == 4 and all('"${locked[@]}"' in line for line in installing)


def test_another_version_than_the_locked_one_may_do(tmp_path: Path) -> None:
    lock = tmp_path / "cpu.lock"
    lock.write_text("ray==2.0\n")
    found = doctor.packages(lock, lambda name: "2.1")
    assert not found.ok and not found.required
    assert doctor.packages(lock, lambda name: "2.0").ok


def test_the_readme_names_the_demo_s_memory() -> None:
    needed = sum(machine.memory_needed(load(doctor.DEMO)).values())
    assert f"{needed / GIB:.1f} GiB of free memory" in (REPOSITORY / "README.md").read_text()


def test_what_there_is_too_little_of() -> None:
    assert doctor.cores(2).ok and not doctor.cores(1).ok
    assert doctor.memory(6 * GIB, 6 * GIB).ok and not doctor.memory(5 * GIB, 6 * GIB).ok
    assert doctor.disk("disk", Path("/tmp/none/yet"), 0).ok
    assert not doctor.disk("disk", Path("/tmp"), 1 << 60).ok


def test_files_may_be_raised_to_the_hard_limit() -> None:
    few = doctor.open_files(256, 256)
    soft = doctor.open_files(1024, resource.RLIM_INFINITY)
    assert (few.ok, few.required, soft.ok, soft.required) == (False, True, False, False)
    assert doctor.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).has == "unlimited"


def test_gpus_are_for_the_installation_that_uses_them() -> None:
    here = ["NVIDIA H200, 580.65.06"] * 2
    found = doctor.judge_gpus(here, for_cpu=False)
    assert found.has == "2 x NVIDIA H200, driver 580.65.06" and found.ok
    old = doctor.judge_gpus(["NVIDIA H200, 570.1"], for_cpu=False)
    assert not old.ok and "driver 580 or newer" in old.remedy
    assert not doctor.judge_gpus([], for_cpu=False).ok and doctor.judge_gpus([], for_cpu=True).ok
    unused = doctor.judge_gpus(here, for_cpu=True)
    assert not unused.ok and not unused.required and "GPU=1" in unused.remedy


def test_folders_sockets_and_compilers(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert doctor.writable(tmp_path / "new").ok and not doctor.writable(tmp_path / "file").ok
    assert doctor.listening("TCP", doctor._tcp).ok and doctor.listening("Unix", doctor._unix).ok

    def refused() -> None:
        raise PermissionError(1, "not allowed")

    assert "not allowed" in doctor.listening("TCP", refused).remedy
    assert not doctor.compiler(None, needed=True).ok and doctor.compiler(None, needed=False).ok


@pytest.mark.slow
def test_a_library_is_loaded_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.library("vllm").ok
    assert doctor.library("msgspec").has == metadata.version("msgspec")
    assert doctor.library("no_such_library").has == "missing"
    assert "takes more than" in doctor.library("msgspec", deadline_s=0.001).remedy
    monkeypatch.setitem(doctor.PARTS, "msgspec", "import os; os.abort()")
    broken = doctor.library("msgspec")
    assert not broken.ok and broken.has == "does not load" and "exit code -6" in broken.remedy
    monkeypatch.setitem(doctor.PARTS, "msgspec", "import no_such_library")
    assert "ModuleNotFoundError" in doctor.library("msgspec").remedy


def test_it_fits_80_columns_and_every_shortcoming_has_its_remedy() -> None:
    console = Console(width=80, record=True, file=StringIO())
    doctor.show([Finding("cores", "1", ">= 2", False, "buy one"), doctor.cores(2)], console)
    said = console.export_text()
    assert "no cores: buy one" in said and "1 problem: a run cannot start here" in said
    assert max(map(len, said.splitlines())) <= 80
