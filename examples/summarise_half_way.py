"""A program that drops what it has read: once it has searched, the policy notes in a thought what
it has found, and goes on with that note in the place of the passages. So a rollout has two
sequences: the first up to the note, the second from there on; both are trained by the one reward.

    environment.name=program environment.program.entry_point=examples/summarise_half_way.py:answer
"""

import re

import httpx
from openai import BadRequestError, OpenAI

TURNS = 8
STOPS = ["</search>", "</think>", "</answer>"]
ACTION = re.compile(r"<(search|think|answer)>((?:(?!<).)*)</\1>$", re.S)
HTTP = httpx.Client(timeout=300)  # made once in an actor: forks of that answer the questions


def answer(question):
    """Return the policy's answer to a question; None where it gives none."""
    client, text, noted = OpenAI(http_client=HTTP), question["question"], False
    for _ in range(TURNS):
        try:
            text += said(client, text)
        except BadRequestError:  # the context is full
            return None
        match ACTION.search(text):
            case re.Match() as action if action[1] == "answer":
                return action[2].strip()
            case re.Match() as action if action[1] == "search":
                text += searched(client, action[2].strip())
            case re.Match() as action if not noted and "<information>" in text:
                before = text.partition("<information>")[0]
                text, noted = f"{before}<information> {action[2].strip()} </information> ", True
            case None:
                return None
    return None


def said(client, text):
    """What the policy says next, its stop included, so that the next prompt goes on with it."""
    whole = {"include_stop_str_in_output": True}
    reply = client.completions.create(model="policy", prompt=text, stop=STOPS, extra_body=whole)
    return reply.choices[0].text


def searched(client, query):
    """The passages of a search, as the policy reads them."""
    found = client.post("/retrieve", cast_to=object, body={"queries": [query], "topk": 3})
    shown = " ".join(each["contents"] for each in found["result"][0])
    return f" <information> {shown} </information> "
