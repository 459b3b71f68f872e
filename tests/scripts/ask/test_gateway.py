"""`forage gateway` serves a model by hand; the lines that it prints work."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.runtime.process import Exit
from scripts import cli
from scripts.ask.gateway import _lines

CURL = r"^curl(?:.*\\\n)+.*"
KEY = "forage-" + 43 * "x"


def test_the_lines_fit_a_terminal() -> None:
    for chat in (False, True):
        text = "\n".join(_lines("http://127.0.0.1:65535/v1", KEY, chat, True))
        assert max(map(len, text.splitlines())) <= 80


def test_bad_input_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {path: nowhere}\n")
    assert cli.main(["gateway", str(config), "--port", "70000"]) == Exit.BAD_INPUT
    assert "--port 70000" in capsys.readouterr().err
    assert cli.main(["gateway", str(config)]) == Exit.BAD_INPUT
    assert "model.path = 'nowhere'" in capsys.readouterr().err


def test_a_program_of_the_configuration_is_not_imported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config, agent = tmp_path / "config.yaml", tmp_path / "agent.py"
    agent.write_text(f"open('{tmp_path}/imported', 'w')\n1 / 0\n")
    config.write_text("model: {path: nowhere}\nenvironment: {name: program, program: ")
    with config.open("a") as file:
        file.write(f"{{entry_point: '{agent}:answer'}}}}\n")
    assert cli.main(["gateway", str(config)]) == Exit.BAD_INPUT
    assert "entry_point" not in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_model_is_served_until_ctrl_c(spoken_model_path: Path, tmp_path: Path) -> None:
    config, corpus, out = (tmp_path / name for name in ("config.yaml", "corpus.jsonl", "out"))
    corpus.write_text('{"id": "p0", "contents": "The mayor of bore is kelu."}\n')
    config.write_text(
        f"model: {{path: {spoken_model_path}, dtype: float32, max_model_len: 256}}\n"
        f"actors: {{max_num_seqs: 4}}\nretrieval: {{corpus: {corpus}}}\n"
    )
    command = [sys.executable, "-m", "scripts.cli", "gateway", str(config)]
    with out.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while "Ctrl-C" not in out.read_text():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        told = out.read_text()
        assert shell(told, CURL) and shell(told, r"^python -c '[^']*'") is not None
        asked = told.replace("$OPENAI_BASE_URL/completions", "$FORAGE_RETRIEVAL_URL")
        assert "kelu" in shell(asked.replace('"prompt": "Hello"', '"query": "bore"'), CURL)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == Exit.DONE


def shell(told: str, pattern: str) -> str:
    """The output of a printed command, run as it is."""
    exports = re.findall(r"^export .*", told, re.M)
    found = re.search(pattern, told, re.M)
    assert found is not None
    command = "\n".join([*exports, found[0].replace("python ", f"{sys.executable} ")])
    done = subprocess.run(
        ["bash", "-ec", command], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0 and '"error"' not in done.stdout, done.stdout + done.stderr
    return done.stdout.strip()
