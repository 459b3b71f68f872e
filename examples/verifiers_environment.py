"""An environment of verifiers, with a tool that searches and a rubric whose reward trains: a
command, on a Python of its own (`pip install verifiers==0.2.1`: docs/environments.md).

    environment.name=program rewards.weights.environment=1 rewards.weights.em=0
    environment.program.command=[/opt/verifiers/bin/python,$PWD/examples/verifiers_environment.py]

One that is installed is made by `vf.load_environment(NAME)` in the place of `environment_of`.
"""

import asyncio
import json
import sys

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI, InternalServerError

SYSTEM = "Search until you can answer. Then give the answer within <answer> and </answer>."


def environment_of(question, client):
    """The environment of one question."""

    async def search(query: str) -> str:
        """Search for passages.

        Args:
            query: What to search for.
        """
        found = await client.post("/retrieve", cast_to=object, body={"query": query, "topk": 3})
        return "\n".join(each["contents"] for each in found["result"][0])

    async def is_right(parser, completion, info):
        return float(parser.parse_answer(completion) in info["answers"])

    parser = vf.XMLParser(["answer"])
    row = {"question": question["question"], "info": {"answers": question["answers"]}}
    return vf.ToolEnv(
        tools=[search],
        stop_errors=[InternalServerError],  # a search that fails is nothing to read
        max_turns=6,
        dataset=Dataset.from_list([row]),
        system_prompt=SYSTEM,
        parser=parser,
        rubric=vf.Rubric([is_right], parser=parser),
    )


async def rolled_out(question):
    """What the rollout came to: an answer and its reward; neither where an error ended it."""
    client = AsyncOpenAI()  # its URL and key are in the environment
    env = environment_of(question, client)
    policy = vf.OpenAIChatCompletionsClient(client)
    ended = await env.run_rollout(env.get_dataset()[0], policy, "policy", {})
    answer = env.parser.parse_answer(ended["completion"])
    return {} if ended["error"] else {"answer": answer, "reward": ended["reward"]}


print(json.dumps(asyncio.run(rolled_out(json.load(sys.stdin)))))
