"""Logs that a real ledger wrote."""

from tests.scripts.conftest import make_recorded_run as make_recorded_run
from tests.scripts.conftest import recorded_run as recorded_run
