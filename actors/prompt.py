"""The only place where text becomes tokens: questions, observations and corrections; and back.

Pieces are tokenised apart and joined as ids, so that the tags around passages survive every cut and
a piece has the same ids wherever it stands.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.load import ConfigError
from configs.schema import ActorsConfig, QuestionsConfig
from replay.trajectory import Question
from retrieval_server.protocol import Passage

Tokens = NDArray[np.int32]
_REMEMBERED = 8192  # encoded pieces: siblings ask the same question and see the same passages


class Prompter:
    """Turns questions, passages and corrections into ids with one Hugging Face tokenizer.

    Raises ConfigError when a template holds fields other than those it is given.
    """

    def __init__(self, tokenizer: Any, questions: QuestionsConfig, actors: ActorsConfig) -> None:
        self._tokenizer, self._questions, self._actors = tokenizer, questions, actors
        self._has_template = questions.chat_template and bool(
            getattr(tokenizer, "chat_template", None)
        )
        before, field, after = actors.observation_template.partition("{passages}")
        if not field:
            raise ConfigError(
                f"actors.observation_template = {actors.observation_template!r}: "
                "it must contain {passages}"
            )
        self._encode = lru_cache(_REMEMBERED)(self._encode_now)
        self._before, self._after = self._encode(before), self._encode(after)
        self._passage_text(Passage("", "", 0.0), 1)

    def question(self, question: Question) -> Tokens:
        """int32[P]: the prompt of a question, through the chat template when there is one.

        The text is stripped and ends with a question mark, as Search-R1's `make_prefix` has it.
        """
        text = question.text.strip()
        text = text if text.endswith("?") else f"{text}?"
        return self._question(self._questions.prompt.replace("{question}", text))

    def observation(self, passages: Sequence[Passage]) -> Tokens:
        """int32[O]: the passages in the order given, each cut to `max_passage_tokens`, between the
        template's uncut ends; none give the empty block."""
        texts = [self._passage_text(passage, rank) for rank, passage in enumerate(passages, 1)]
        if texts:
            texts[0], texts[-1] = texts[0].lstrip(), texts[-1].rstrip()
        limit = self._actors.max_passage_tokens
        pieces = [self._before, *(self._encode(text)[:limit] for text in texts), self._after]
        return np.concatenate(pieces)

    def correction(self) -> Tokens:
        """int32[O]: what the policy reads after a malformed action."""
        return self._encode(self._actors.correction)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """The exact text of ids, special tokens included."""
        ids = np.asarray(tokens).tolist()
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _question(self, text: str) -> Tokens:
        if not self._has_template:
            return self._encode(text, True)
        message = [{"role": "user", "content": text}]
        return self._encode(
            self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        )

    def _passage_text(self, passage: Passage, rank: int) -> str:
        template = self._actors.passage_template
        try:
            return template.format(rank=rank, title=passage.title, text=passage.text)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"actors.passage_template = {template!r}: use only {{rank}}, {{title}} and {{text}}"
            ) from error

    def _encode_now(self, text: str, with_special: bool = False) -> Tokens:
        ids = self._tokenizer.encode(text, add_special_tokens=with_special)
        tokens = np.asarray(ids, dtype=np.int32)
        tokens.setflags(write=False)
        return tokens


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer in a model folder. Raises OSError or ValueError without one."""
    from transformers import AutoTokenizer  # slow to import; not needed by tests with a fake

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def tokenizer_digest(tokenizer: Any) -> str:
    """blake2b of the vocabulary: equal digests mean equal ids for equal tokens."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()


def single_token_ids(tokenizer: Any, texts: Sequence[str]) -> list[int] | None:
    """The id of each text when every one is a single token of its own, else None."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    if any(len(ids) != 1 for ids in encoded):
        return None
    ids = [ids[0] for ids in encoded]
    unknown = tokenizer.unk_token_id
    return None if unknown in ids else ids
