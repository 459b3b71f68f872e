"""The file of versions that actors took up: appended, read on, and never what ends a run."""

from pathlib import Path

import msgspec
import pytest

from learner.metrics.applications import FILE_NAME, Application, Applications
from weight_sync.protocol import Applied

SAID = Applied("actor-0", 3, 1, 7, "digest", ("sum",), 0.0, 0.0, 0.25, 1.5, 0.1)


def test_what_is_noted_is_read_on(tmp_path: Path) -> None:
    writer, reader = Applications(tmp_path), Applications(tmp_path)
    assert reader.news() == []
    writer.note(SAID)
    (line,) = reader.news()
    assert line == Application(line.at_s, "actor-0", 7, 1.5, 0.25) and line.at_s > 1e9
    writer.note(msgspec.structs.replace(SAID, policy_version=8))
    assert [each.version for each in reader.news()] == [8] and reader.news() == []


def test_what_is_no_line_is_left_out(tmp_path: Path) -> None:
    good = b'[5.0,"actor-0",1,2.0,0.5]\n'
    (tmp_path / FILE_NAME).write_bytes(
        b'\xff\n[]\n{}\n[-5.0,"a",1,2.0,0.5]\n[1e99,"a",1,2.0,0.5]\n[1e11,"a",1,2.0,0.5]\n[1.0,"a",1,2.0,0.5]\n'
        + good
        + good[:9]
    )
    reader = Applications(tmp_path)
    assert reader.news() == [Application(5.0, "actor-0", 1, 2.0, 0.5)] and reader.news() == []
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(good[9:])
    assert len(reader.news()) == 1  # once it is whole


def test_a_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Applications(tmp_path / "gone")
    file.note(SAID)
    file.note(SAID)
    assert [each.levelname for each in caplog.records] == ["WARNING"]
