"""Bad input of every command: one line that says what was meant, exit code 2, no traceback."""

from pathlib import Path

import pytest

from configs.runtime.process import Exit
from scripts import cli

NO_CONFIG = "configuration file 'none' does not exist: name one of configs/*.yaml"
NO_RUN = "RUN = 'none': there is no such directory: name a run's directory"
NO_MODEL = "MODEL = 'none': no run (config.yaml), checkpoint"
NO_CORPUS = "'none' does not exist: name a file of passages"
CASES = [
    ("", "name a command: demo, train, "),
    ("trian", "Did you mean 'train'?"),
    ("prepare out", "Did you mean 'data prepare'?"),
    ("data nope", "No such command 'nope'. (forage data --help)"),
    ("show --prepare-only", "forage train and resume take it"),
    ("train --quick", "no option --quick: forage bench learner, bench staleness, bench stream, "),
    ("bench --quick", "no option --quick: forage bench learner, "),
    ("--steps 3", "no option --steps: "),
    ("train", "train: name 'CONFIG', a YAML file"),
    *(
        (f"{each} none", NO_CONFIG)
        for each in ("train", "sync", "try", "data audit", "memory", "doctor")
    ),
    *(
        (f"{each} .", "'.' is a folder")
        for each in ("train", "sync", "try", "data audit", "doctor")
    ),
    ("memory none.yaml --gpus 1", "'none.yaml' does not exist"),
    ("warm-start none --from-run none", NO_CONFIG),
    *((f"{each} none", NO_RUN) for each in ("resume", "relearn", "show", "audit", "compact")),
    *(
        (f"{each} .", "RUN = '.': no config.yaml")
        for each in ("resume", "relearn", "show", "audit")
    ),
    *((f"{each} .", "RUN = '.': no config.yaml") for each in ("compact", "plot")),
    ("plot none", NO_RUN),
    ("scale none 1", NO_RUN),
    ("scale . 1", "RUN = '.': no config.yaml"),
    ("evaluate none --sets none", NO_MODEL),
    ("evaluate . --sets none", "MODEL = '.': no run"),
    ("ask none", "'none': no such folder: name a run"),
    ("data prepare out --from none", "'none/nq' holds no train.jsonl"),
    ("index none out", NO_CORPUS),
    ("demo learner.stepz=3", "unknown key 'learner.stepz'"),
    ("bench stream --peers -1", "--peers -1: at least 0"),
    ("bench staleness learner.stepz=3", "unknown key 'learner.stepz'"),
    ("bench staleness --seeds 0 -1", "--seeds -1: at least 0"),
    ("bench retrieval --corpus none", NO_CORPUS),
    ("bench learner --threads 0", "--threads 0: at least 1"),
    ("bench overlap --seats 0", "--seats 0: at least 1"),
    ("bench weight-sync --updates -1", "--updates -1: at least 0"),
]


@pytest.mark.parametrize(("words", "said"), CASES, ids=[words or "nothing" for words, _ in CASES])
def test_it_is_one_line(
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) == Exit.BAD_INPUT
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("forage: ")


def test_no_command_is_left_out() -> None:
    tried = " ".join(words for words, _ in CASES)
    assert [command for command in cli.COMMANDS if command not in tried] == []
