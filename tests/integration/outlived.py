"""A test that is still running when its pytest is killed, for `test_survivors.py`: an engine in
this process and a run that starts beside it.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Run

BEGUN = "FORAGE_BEGUN"


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.timeout(900)
async def test_that_never_ends(vllm_policy: Any, launch: Callable[..., Run]) -> None:
    run = launch()
    run.wait_for("starting engines", 300)
    Path(os.environ[BEGUN]).touch()
    time.sleep(600)
