"""What tests of programs share: a question, one run, and the processes that are left."""

import json

import psutil

from actors.gateway.program import Ended, Programs
from configs.environment import ProgramConfig

QUESTION = json.dumps({"id": "q-1", "question": "what is the mayor of bore ?"})


async def run(settings: ProgramConfig, question: str = QUESTION, **environment: str) -> Ended:
    async with Programs(settings) as programs:
        return await programs.run(question, environment)


def living(mark: str) -> list[psutil.Process]:
    """The processes whose command line holds a word, zombies left out."""
    found = []
    for each in psutil.process_iter(["cmdline", "status"]):
        ended = each.info["status"] == psutil.STATUS_ZOMBIE
        if mark in " ".join(each.info["cmdline"] or ()) and not ended:
            found.append(each)
    return found
