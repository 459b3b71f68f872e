"""The launcher's line to a node: what it says of what went wrong there."""

from scripts.fleet.post import _gist

IMPORT = """The actor with name Outpost failed to import on the worker.

Traceback (most recent call last):
  File "worker.py", line 1, in load
ModuleNotFoundError: No module named 'scripts'
"""


def test_an_error_is_one_line_of_what_it_says() -> None:
    assert _gist(OSError("The actor died.\n  on node 7")) == "The actor died"
    assert _gist(RuntimeError(IMPORT)) == "ModuleNotFoundError: No module named 'scripts'"
    assert _gist(TimeoutError()) == "TimeoutError"
