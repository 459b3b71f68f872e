"""The loop of Search-R1's `infer.py` on `/v1/completions`, by the standard library alone: a command
that reads the question on its standard input and prints its answer as the last line.

    environment.name=program environment.program.command=[python3,$PWD/examples/search_r1_infer.py]

`infer.py` puts a blank line before what the policy has said, once that is read again. Here that
stays as it was sampled: a prompt that goes on with it, token for token, is the same sequence.
"""

import json
import os
import re
import sys
import urllib.request

SEARCHES = 4
TEMPLATE = "\n\n<information>{}</information>\n\n"
PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every "
    "time you get new information. After reasoning, if you find you lack some knowledge, you can "
    "call a search engine by <search> query </search> and it will return the top searched results "
    "between <information> and </information>. You can search as many times as your want. If you "
    "find no further external knowledge needed, you can directly provide the answer inside "
    "<answer> and </answer>, without detailed illustrations. For example, <answer> Beijing "
    "</answer>. Question: {}\n"
)


def post(url, **fields):
    """Post JSON with the session's key; the reply's JSON."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)


def search(query):
    """The passages of a search in Search-R1's form."""
    found = post(os.environ["FORAGE_RETRIEVAL_URL"], queries=[query], topk=3, return_scores=True)
    shown = ""
    for rank, each in enumerate(found["result"][0], 1):
        title, _, text = each["document"]["contents"].partition("\n")
        shown += f"Doc {rank}(Title: {title}) {text}\n"
    return shown


prompt = PROMPT.format(json.load(sys.stdin)["question"].strip())
for _ in range(SEARCHES + 1):
    url, stop = os.environ["OPENAI_BASE_URL"], ["</search>"]
    asked = {"prompt": prompt, "stop": stop, "include_stop_str_in_output": True}
    said = post(f"{url}/completions", model="policy", **asked)["choices"][0]["text"]
    prompt += said
    if not (query := re.search(r"<search>(.*?)</search>$", said, re.S)):
        break
    prompt += TEMPLATE.format(search(query[1].strip()))
answers = re.findall(r"<answer>(.*?)</answer>", said, re.S)
print(json.dumps({"answer": answers[-1].strip() if answers else None}))
