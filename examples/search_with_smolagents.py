"""An agent of smolagents, which searches by one tool and answers by another: a command, on a Python
of its own (`pip install smolagents==1.26.0 openai==3.57.0`: docs/environments.md).

    environment.name=program
    environment.program.command=[/opt/agents/bin/python,$PWD/examples/search_with_smolagents.py]

smolagents tells the policy its earlier calls in words of its own, not as they were sampled. So each
call of the policy is a sequence of its own, trained by the one reward.
"""

import json
import sys

from openai import BadRequestError
from smolagents import AgentGenerationError, LogLevel, OpenAIServerModel, ToolCallingAgent, tool

# URL and key are in the environment. What is refused stays so: a retry would wait for minutes.
MODEL = OpenAIServerModel("policy", retry=False)


@tool
def search(query: str) -> str:
    """Search for passages.

    Args:
        query: What to search for.
    """
    found = MODEL.client.post("/retrieve", cast_to=object, body={"query": query, "topk": 3})
    return "\n".join(each["contents"] for each in found["result"][0])


agent = ToolCallingAgent([search], MODEL, max_steps=6, verbosity_level=LogLevel.OFF)
answer = None
try:
    ended = agent.run(json.load(sys.stdin)["question"], return_full_result=True)
    if ended.state == "success":  # else its output may be the words of an error
        answer = str(ended.output)
except AgentGenerationError as error:
    refused = error.__cause__  # what the endpoint said
    if not (isinstance(refused, BadRequestError) and refused.code == "context_length_exceeded"):
        raise
print(json.dumps({"answer": answer}))
