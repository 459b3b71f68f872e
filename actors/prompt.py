"""Tokenisation, the only place where text becomes tokens and back: questions, observations (the
passages shown) and corrections; and the tokens that end a completion.

Pieces are tokenised apart and joined as ids, so that the tags around passages survive every cut and
a piece has the same ids wherever it stands.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.truncation import Truncation
from configs.load import ConfigError
from configs.prompts import SEARCH_R1_PROMPT
from configs.schema import ActorsConfig, QuestionsConfig
from replay.trajectory import Question
from retrieval_server.protocol import Passage

Tokens = NDArray[np.int32]
Message = dict[str, Any]
Schemas = Sequence[dict[str, Any]]
# Encoded pieces are cached: siblings ask the same question and see the same passages.
_CACHED_CHARS = 32 << 20  # of all pieces at most
_PIECE_CHARS = 4096  # of one that is cached; more only where passages are cut later
_CHARS_PER_TOKEN = 8  # as much foreign text is tried first; most languages need less
_OWN_ARGUMENTS = (  # that Forage gives, or that change what is given back
    *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding"),
    *("add_generation_prompt", "continue_final_message", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
_HERE = "\ue000passages\ue000"  # stands in a prompt for what is tokenised apart


class Prompter:
    """Tokenises questions, passages and corrections with one Hugging Face tokenizer.

    Foreign text (passages, tool results) is plain text: the text of a special token in it never
    becomes that token. Raises ConfigError where a template holds unknown fields.
    """

    def __init__(self, tokenizer: Any, questions: QuestionsConfig, actors: ActorsConfig) -> None:
        self._tokenizer, self._questions, self._actors = tokenizer, questions, actors
        self.has_chat_template = questions.chat_template and bool(
            getattr(tokenizer, "chat_template", None)
        )
        self._template_arguments = dict(questions.template_arguments)
        self._check_template_arguments()
        before, field, after = actors.observation_template.partition("{passages}")
        if not field:
            raise ConfigError(
                f"actors.observation_template = {actors.observation_template!r}: "
                "it must contain {passages}"
            )
        unknown = getattr(tokenizer, "unk_token_id", None)
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ())) - {unknown}
        self._plain = _plain_text_options(tokenizer)
        self._truncation = Truncation(getattr(tokenizer, "get_vocab", dict)())
        self._piece_chars = max(_PIECE_CHARS, 2 * actors.max_passage_tokens * _CHARS_PER_TOKEN)
        self._cached = lru_cache(_CACHED_CHARS // self._piece_chars)(self._encode_now)
        self._before, self._after = self._encode(before), self._encode(after)
        self._passage_text(Passage("", "", 0.0), 1)

    def copy(self) -> "Prompter":
        """Return one with a tokenizer of its own: a tokenizer is for one thread at a time."""
        return Prompter(deepcopy(self._tokenizer), self._questions, self._actors)

    def question(
        self,
        question: Question,
        own: str = SEARCH_R1_PROMPT,
        *,
        system: str = "",
        tools: Schemas | None = None,
        searches: int = 0,
        passages: Sequence[Passage] | None = None,
        question_mark: bool = False,
    ) -> Tokens:
        """Return int32[P]: the prompt of a question, through the chat template where there is one.

        The template is `questions.prompt`, or the environment's `own` where that is empty or
        Search-R1's (once its default, which configs of earlier runs hold). {question}, {searches}
        and, with `passages`, {passages} are filled in; passages follow a template that lacks their
        field, as in an observation. The question is stripped. With `question_mark`, Search-R1's
        own way (`make_prefix`), it ends with one in the environment's own template.
        """
        asked = self._questions.prompt
        is_own = asked in ("", SEARCH_R1_PROMPT)
        template = own if is_own else asked
        if passages is not None and "{passages}" not in template:
            template += self._actors.observation_template
        text = question.text.strip()
        if question_mark and is_own and not text.endswith("?"):
            text += "?"
        fields = {"question": text, "searches": str(searches)}
        if passages is None:
            return self._prompt(_filled(template, fields), system, tools)
        fields = {name: each.replace(_HERE, "") for name, each in fields.items()}
        text = _filled(template, fields | {"passages": _HERE})
        return self._prompt(text, system, tools, self.shown(passages))

    def observation(self, *groups: Sequence[Passage]) -> Tokens:
        """Return int32[O]: the passages of each query in the order given, each cut to
        `max_passage_tokens`, between the template's uncut ends; without any, the empty block.
        """
        return np.concatenate([self._before, *self.shown(*groups), self._after])

    def result(self, text: str) -> Tokens:
        """Return int32[O]: a tool's result, cut like one passage, between the same ends."""
        return np.concatenate([self._before, self.foreign(text.strip()), self._after])

    def shown(
        self, *groups: Sequence[Passage], change: Callable[[str], str] = lambda text: text
    ) -> list[Tokens]:
        """Tokenise the passages of each query apart; ranks begin anew with each. `change`: a chat
        template's change to a text.
        """
        ranked = [(rank, each) for group in groups for rank, each in enumerate(group, 1)]
        texts = [self._passage_text(passage, rank) for rank, passage in ranked]
        if texts:
            texts[0], texts[-1] = texts[0].lstrip(), texts[-1].rstrip()
        return [self.foreign(change(text)) for text in texts]

    def foreign(self, text: str) -> Tokens:
        """Return int32[n]: foreign text, cut to `max_passage_tokens`; no special token in it.

        Only as much of it is tokenised as is kept, and a little more (`actors/truncation.py`).
        """
        limit = self._actors.max_passage_tokens
        end = self._truncation.end(text, limit * _CHARS_PER_TOKEN)
        while len(tokens := self._encode(text[:end], False, True)) < limit and end < len(text):
            end = self._truncation.end(text, 2 * end)
        return tokens[:limit]

    def observed(self, text: str) -> Tokens:
        """Return int32[O]: an uncut observation; between the template's ends, foreign text."""
        before, _, after = self._actors.observation_template.partition("{passages}")
        inner = text.removeprefix(before).removesuffix(after)
        if before + inner + after != text:
            return self._encode(text, False, True)
        return np.concatenate([self._before, self._encode(inner, False, True), self._after])

    def plain(self, text: str) -> Tokens:
        """Return int32[n]: other people's text, uncut; no special token in it."""
        return self._encode(text, False, True)

    def document(self, text: str) -> Tokens:
        """Return int32[n]: a whole prompt's text, behind what the tokenizer begins any text with;
        special tokens in it are such.
        """
        return self._encode(text, True)

    def text(self, text: str) -> Tokens:
        """Return int32[n]: our own text, or a chat template's: special tokens in it are such."""
        return self._encode(text)

    def correction(self) -> Tokens:
        """Return int32[O]: the observation after a malformed action."""
        return self._encode(self._actors.correction)

    def render(
        self, messages: Sequence[Message], tools: Schemas | None = None, generate: bool = True
    ) -> str:
        """Render a conversation with the chat template; `generate` opens the policy's turn."""
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=generate,
            **self._template_arguments,
        )
        return text

    def chat_template(self, tools: Schemas) -> str:
        """Return the chat template that `render` uses with these tools."""
        text: str = self._tokenizer.get_chat_template(None, list(tools))
        return text

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer itself, for what reads calls by its vocabulary."""
        return self._tokenizer

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of the tokenizer's special tokens, the longest first."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        found = {str(each.content) for each in added if each.special}
        return tuple(sorted(found, key=len, reverse=True))

    @property
    def end_token(self) -> int | None:
        """The tokenizer's own end token."""
        found: int | None = self._tokenizer.eos_token_id
        return found

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """Return the exact text of ids, special tokens included."""
        ids = np.asarray(tokens).tolist()
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def said(self, action_tokens: Tokens, ends: Collection[int] = ()) -> str:
        """Return a completion's text without end tokens (own, padding, `ends`) at its end."""
        ids = np.asarray(action_tokens).tolist()
        stripped = {self._tokenizer.eos_token_id, self._tokenizer.pad_token_id, *ends}
        while ids and ids[-1] in stripped:
            ids.pop()
        return self.decode(ids)

    def _prompt(
        self, text: str, system: str, tools: Schemas | None, shown: Sequence[Tokens] = ()
    ) -> Tokens:
        if self.has_chat_template:
            messages = [{"role": "system", "content": system}] if system else []
            text = self.render([*messages, {"role": "user", "content": text}], tools)
        before, here, after = text.partition(_HERE)
        head = self._encode(before, not self.has_chat_template)
        return np.concatenate([head, *shown, self._encode(after)]) if here else head

    def _check_template_arguments(self) -> None:
        template = str(self._tokenizer.chat_template) if self.has_chat_template else ""
        for name, value in self._template_arguments.items():
            field = f"questions.template_arguments = {{{name!r}: {value!r}}}"
            if name in _OWN_ARGUMENTS:
                raise ConfigError(f"{field}: Forage gives the chat template its {name}: leave it")
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise ConfigError(
                    f"{field} acts on nothing: the chat template of the model knows no {name}: "
                    "leave it out"
                )

    def _passage_text(self, passage: Passage, rank: int) -> str:
        template = self._actors.passage_template
        try:
            return template.format(rank=rank, title=passage.title, text=passage.text)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"actors.passage_template = {template!r}: use only {{rank}}, {{title}} and {{text}}"
            ) from error

    def _encode(self, text: str, with_special: bool = False, foreign: bool = False) -> Tokens:
        short = len(text) <= self._piece_chars
        return (self._cached if short else self._encode_now)(text, with_special, foreign)

    def _encode_now(self, text: str, with_special: bool = False, foreign: bool = False) -> Tokens:
        options = self._plain if foreign else {}
        ids = self._tokenizer.encode(text, add_special_tokens=with_special, **options)
        if foreign:  # a vocabulary of whole words may hold them as words
            ids = [each for each in ids if each not in self._special]
        tokens = np.asarray(ids, dtype=np.int32)
        tokens.setflags(write=False)
        return tokens


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Load the Hugging Face tokenizer of a model folder. Raises OSError or ValueError."""
    try:
        if _is_plain(path):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer  # imports torch

        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        raise
    except Exception as error:  # of a damaged file, whatever its reader met
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _is_plain(path: str) -> bool:
    """True for a Llama's folder with a tokenizer of no family: there AutoTokenizer would choose
    PreTrainedTokenizerFast, once it has imported torch. (For some families it puts its own class in
    the place of the one that is named.)
    """
    try:
        config, tokenizer = (
            json.loads(Path(path, name).read_bytes())
            for name in ("config.json", "tokenizer_config.json")
        )
        named = (config["model_type"], tokenizer["tokenizer_class"])
    except (OSError, ValueError, LookupError, TypeError):
        return False  # AutoTokenizer says what is wrong
    return named == ("llama", "TokenizersBackend") and "auto_map" not in tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Return blake2b of the vocabulary: equal digests mean equal ids for equal tokens."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest()


def single_token_ids(tokenizer: Any, texts: Sequence[str]) -> list[int] | None:
    """Return the id of each text where every one is a single token of its own, else None."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    if any(len(ids) != 1 for ids in encoded):
        return None
    ids = [ids[0] for ids in encoded]
    unknown = tokenizer.unk_token_id
    return None if unknown in ids else ids


def end_tokens(prompter: Prompter, model_path: str) -> frozenset[int]:
    """Return every token that ends a completion: the tokenizer's and the model folder's."""
    found = {prompter.end_token}
    for name in ("config.json", "generation_config.json"):
        if model_path and (path := Path(model_path, name)).is_file():
            tree = json.loads(path.read_text(encoding="utf-8"))
            for part in (tree, tree.get("text_config") or {}):
                named = part.get("eos_token_id")
                found |= set(named if isinstance(named, list) else [named])
    return frozenset(each for each in found if each is not None)


def _filled(template: str, fields: dict[str, str]) -> str:
    """Fill each field once: filled-in text is not searched for fields again."""
    names = "|".join(fields)
    return re.sub(rf"\{{({names})\}}", lambda found: fields[found[1]], template)


def _plain_text_options(tokenizer: Any) -> dict[str, bool]:
    """Return the options that make the tokenizer split special tokens; none where it cannot."""
    options = {"split_special_tokens": True}
    try:
        tokenizer.encode("a", add_special_tokens=False, **options)
    except (TypeError, ValueError):
        return {}
    return options
