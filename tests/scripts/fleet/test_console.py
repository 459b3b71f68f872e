"""What a person is told while a run goes on."""

import pytest

from replay.protocol import StepReport
from scripts.fleet.console import Console


@pytest.mark.parametrize(("count", "said"), [(2.0, "TOKEN MISMATCHES 2\n"), (0.0, "pause 0 ms\n")])
def test_a_token_mismatch_stands_in_the_line_of_its_step(
    capsys: pytest.CaptureFixture[str], count: float, said: str
) -> None:
    Console().step(StepReport(7, {"actor/token_mismatch": count}), 20)
    assert capsys.readouterr().out.endswith(said)
