"""Search-R1's loop on the plain `openai` client: the policy searches, reads, and answers. With
environment.name=program environment.program.entry_point=examples/search_with_openai.py:answer
"""

import re

import httpx
from openai import BadRequestError, OpenAI

SEARCHES, STOPS, WHOLE = 3, ["</search>", "</answer>"], {"include_stop_str_in_output": True}
ACTION = re.compile(r"<(search|answer)>((?:(?!<).)*)</\1>$", re.S)
HTTP = httpx.Client(timeout=300)  # made once in an actor: forks of that answer the questions


def answer(question):
    """Return the policy's answer to a question; None where it gives none."""
    client, text = OpenAI(http_client=HTTP), question["question"]
    for _ in range(SEARCHES + 1):
        try:
            text += said(client, text)
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return None
        action = ACTION.search(text)
        if action and action[1] == "answer":
            return action[2].strip()
        text += searched(client, action[2].strip()) if action else " try again . "


def said(client, text):
    """What the policy says next, its stop included, so that the next prompt goes on with it."""
    reply = client.completions.create(model="policy", prompt=text, stop=STOPS, extra_body=WHOLE)
    return reply.choices[0].text


def searched(client, query):
    """The passages of a search, as the policy reads them."""
    found = client.post("/retrieve", cast_to=object, body={"query": query, "topk": 3})["result"][0]
    return f" <information> {' '.join(each['contents'] for each in found)} </information> "
