"""Chat templates as two families of models have them, and tokenizers that carry them."""

import copy
from typing import Any

CHATML = (
    "{% set named = messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + (messages[0].content if named else 'You help.') }}"
    "{% if tools %}{{ '\n\n# Tools\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    '{{ \'\n</tools>\nCall one by <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>\' }}'
    "{% endif %}{{ '<|im_end|>\n' }}"
    "{% for message in messages[(1 if named else 0):] %}{% if message.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{% for message in messages %}"
    "{% set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{% if loop.first and tools %}"
    '{{ \'Call one by {"name": ..., "parameters": ...}\n\' }}'
    "{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}{% endif %}"
    "{{ (message.content | tojson) if role == 'ipython' else message.content }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_MARKS = {
    CHATML: ("<|im_start|>", "<|im_end|>"),
    LLAMA: ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}


def chat_tokenizer(base: Any, template: str = CHATML, end: str = "") -> Any:
    """A copy of the byte-level BPE tokenizer with the template, its marks as special tokens, and
    the last of them, or `end`, as its end token."""
    tokenizer = copy.deepcopy(base)
    marks = _MARKS.get(template, _MARKS[CHATML])
    tokenizer.add_tokens(list(marks), special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token = template, end or marks[-1]
    return tokenizer
