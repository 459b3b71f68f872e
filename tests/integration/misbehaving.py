"""A program that answers as `examples/search_with_openai.py` does, after one rollout each has gone
wrong in one of the `WAYS`: each makes a file in the folder CLAIMED, and is done by nobody else.
"""

import os
import runpy
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from openai import APIStatusError, OpenAI

WAYS = ("crash", "hang", "fork", "call_later", "megabyte")
searched = runpy.run_path(f"{Path(__file__).parents[2]}/examples/search_with_openai.py")["answer"]


def answer(question: dict[str, Any]) -> str | None:
    """Go wrong in a way that is still to be done, where there is one; else answer."""
    way = claimed() if question["kind"] == "train" else None
    if way == "crash":
        searched(question)
        raise RuntimeError("boom")
    if way == "hang":
        time.sleep(600)
    if way == "fork":
        for _ in range(8):
            leave(lambda: time.sleep(600))
    if way == "call_later":
        mine = os.getpid()
        leave(lambda: call_after(mine))
    if way == "megabyte":
        note(way, send("x" * 2_000_000))
    return searched(question)


def claimed() -> str | None:
    """The first of the ways that nobody has claimed, which is now claimed."""
    for way in WAYS:
        with suppress(FileExistsError):
            os.close(os.open(f"{os.environ['CLAIMED']}/{way}", os.O_CREAT | os.O_EXCL))
            return way
    return None


def leave(do: Any) -> None:
    """Do this in a process that leaves the program's group, and is not waited for."""
    if os.fork() == 0:
        os.setsid()
        do()
        os._exit(0)


def call_after(program: int) -> None:
    """Call once the program's process has ended, and its warden has had time to see that: until
    then nobody can tell such a call from the program's own.
    """
    while os.getppid() == program:
        time.sleep(0.01)
    time.sleep(2)
    note("call_later", send("who ?"))


def send(prompt: str) -> str:
    """What a call is answered: a status, or "served"."""
    try:
        OpenAI(max_retries=0).completions.create(model="policy", prompt=prompt)
    except APIStatusError as error:
        return f"{error.status_code}"
    return "served"


def note(way: str, said: str) -> None:
    """Write down what a way has come to."""
    Path(os.environ["CLAIMED"], way).write_text(said)
