"""What counts as a program's result, who reads its question, and what is removed."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.errors import ProgramFailed
from actors.gateway.program import Programs, result_of
from actors.gateway.warden import remove
from configs.environment import ProgramConfig
from tests.actors.gateway.programs import QUESTION, run

Settings = Callable[..., ProgramConfig]


async def test_a_function_s_value_is_whole_or_too_long_by_name(entered: Settings) -> None:
    source = "def answer(question):\n    return 'y' * 200_000"
    ended = await run(entered(source, output_bytes=300_000))
    assert result_of(ended).answer == "y" * 200_000
    settings = entered(source)
    ended = await run(settings)
    assert "its result takes 200014 bytes as JSON, over environment.program.output_bytes" in (
        ended.fault(settings)
    )


async def test_a_last_line_is_whole_or_cut_by_name(written: Settings) -> None:
    line = json.dumps({"answer": "y" * 85})  # 100 bytes with its end
    ended = await run(written(f"print('noise')\nprint({line!r})", output_bytes=100))
    assert result_of(ended).answer == "y" * 85
    ended = await run(written(f"print({line!r})", output_bytes=99))
    with pytest.raises(ProgramFailed, match=r"longer than environment\.program\.output_bytes"):
        result_of(ended)


async def test_what_a_child_says_is_no_result(entered: Settings, written: Settings) -> None:
    child = "import subprocess; subprocess.Popen(['sh', '-c', {}])"
    lasting = child.format("'trap : TERM; sleep 1; while :; do echo late; sleep .01; done'")
    ended = await run(written(f'{lasting}\nprint(\'{{"answer": "mine"}}\')'))
    assert result_of(ended).answer == "mine"
    body = child.format("'while :; do echo early; sleep .01; done'")
    body += "; import time; time.sleep(.1); print('noise'); import os; os.fork(); return 'mine'"
    ended = await run(entered(f"def answer(question):\n    {body}"))
    assert result_of(ended).answer == "mine"


async def test_a_question_is_read_once(entered: Settings, written: Settings) -> None:
    again = "import os, subprocess\n{}\ntry:\n    os.lseek(0, 0, 0)\nexcept OSError:\n    pass\n"
    again += "left = subprocess.run(['cat'], stdout=-1, text=True).stdout\n"
    question = json.dumps({"answers": ["x" * 200_000]})  # more than a pipe takes at once
    source = again.format("import json, sys; read = len(json.load(sys.stdin)['answers'][0])")
    ended = await run(written(source + "print(json.dumps({'answer': f'{read} {left}'}))"), question)
    assert result_of(ended).answer == "200000 "
    lines = [*again.format("").splitlines(), "return str(len(question)) + left"]
    source = "def answer(question):\n" + "".join(f"    {line}\n" for line in lines)
    assert result_of(await run(entered(source), question)).answer == "1"


async def test_a_question_that_nobody_reads_holds_up_nobody(written: Settings) -> None:
    began = time.monotonic()
    ended = await run(written("import time; time.sleep(.2); print('{}')"), "x" * 1_000_000)
    assert (ended.cause, ended.status) == ("ended", 0) and time.monotonic() - began < 20


async def test_deep_folders_cost_no_answer(written: Settings, tmp_path: Path) -> None:
    source = f"import os; open('{tmp_path}/at', 'w').write(os.getcwd())\n"
    source += "for _ in range(1500):\n    os.mkdir('d'); os.chdir('d')\n"
    async with Programs(written(source + 'print(\'{"answer": "deep"}\')')) as programs:
        assert result_of(await programs.run(QUESTION, {})).answer == "deep"
    assert not Path((tmp_path / "at").read_text()).exists()


def test_what_is_not_there_is_removed(tmp_path: Path) -> None:
    remove(str(tmp_path / "nowhere"))
    assert list(tmp_path.iterdir()) == []
