"""A program that drops what it has read: a thought that settles a part of the question ("river
buke" where "the river of mida" is asked about) makes it a shorter question, and the policy goes on
from that alone. So such a rollout has two sequences; both are trained by the one reward.

    environment.name=program environment.program.entry_point=examples/summarise_half_way.py:answer
"""

import re

import httpx
from openai import BadRequestError, OpenAI

TURNS, STOPS = 8, ["</search>", "</think>", "</answer>"]
ACTION = re.compile(r"<(search|think|answer)>((?:(?!<).)*)</\1>$", re.S)
HTTP = httpx.Client(timeout=300)  # made once in an actor: forks of that answer the questions


def answer(question):
    """Return the policy's answer to a question; None where it gives none."""
    client, asked = OpenAI(http_client=HTTP), question["question"]
    text = asked
    for _ in range(TURNS):
        try:
            text += said(client, text)
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        if not (action := ACTION.search(text)):
            return None
        if action[1] == "answer":
            return action[2].strip()
        if action[1] == "search":
            text += searched(client, action[2].strip())
        elif (shorter := shortened(asked, action[2].strip())) != asked:
            text = asked = shorter
    return None


def shortened(question, note):
    """The question with what a note has found in the place of what it is about."""
    about, _, found = note.rpartition(" ")
    return re.sub(rf"of the {re.escape(about)} of \S+", f"of {found}", question)


def said(client, text):
    """What the policy says next, its stop included, so that the next prompt goes on with it."""
    whole = {"include_stop_str_in_output": True}
    reply = client.completions.create(model="policy", prompt=text, stop=STOPS, extra_body=whole)
    return reply.choices[0].text


def searched(client, query):
    """The passages of a search, as the policy reads them."""
    found = client.post("/retrieve", cast_to=object, body={"query": query, "topk": 3})["result"][0]
    return f" <information> {' '.join(each['contents'] for each in found)} </information> "
