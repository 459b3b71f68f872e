"""Foreign text is cut before it is tokenised, and its tokens are those of the whole text."""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.prompt import Prompter
from actors.truncation import Truncation
from configs.schema import ActorsConfig, QuestionsConfig
from tests.actors.conftest import BYTE_LEVEL_TEXTS
from tests.byte_level import make_llama_tokenizer, make_qwen_tokenizer

WHITE = (" ", "  ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u200b", "▁")
WORDS = ("mayor", "Bore", "is", "x", ".", "!?", "'s", "12345", "é", "e\u0301", "市長", "。", "🙂")
TAGS = ("<search>", "<|end|>", "<information>")
TEXTS = st.lists(st.sampled_from((*WHITE, *WORDS, *TAGS)), max_size=120).map("".join)
KINDS = ("bpe", "words", "qwen", "llama", "unigram", "wordpiece")


def unigram() -> Any:
    from tokenizers import SentencePieceUnigramTokenizer
    from transformers import PreTrainedTokenizerFast

    backend = SentencePieceUnigramTokenizer()
    backend.train_from_iterator(
        BYTE_LEVEL_TEXTS, vocab_size=200, unk_token="<unk>", special_tokens=["<unk>", "</s>"],
        show_progress=False,
    )  # fmt: skip
    made = backend._tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def wordpiece() -> Any:
    from tokenizers import BertWordPieceTokenizer
    from transformers import PreTrainedTokenizerFast

    backend = BertWordPieceTokenizer()
    backend.train_from_iterator(BYTE_LEVEL_TEXTS, vocab_size=300, show_progress=False)
    made = backend._tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[SEP]", unk_token="[UNK]")


@pytest.fixture(scope="module")
def tokenizers(bpe_tokenizer: Any, word_tokenizer: Any) -> dict[str, Any]:
    made = (
        bpe_tokenizer,
        word_tokenizer,
        make_qwen_tokenizer(BYTE_LEVEL_TEXTS),
        make_llama_tokenizer(BYTE_LEVEL_TEXTS),
        unigram(),
        wordpiece(),
    )
    return dict(zip(KINDS, made, strict=True))


def prompter(tokenizer: Any, limit: int) -> Prompter:
    return Prompter(tokenizer, QuestionsConfig(), ActorsConfig(max_passage_tokens=limit))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(text=TEXTS, limit=st.integers(1, 12))
def test_the_tokens_are_those_of_the_whole_text(
    tokenizers: dict[str, Any], kind: str, text: str, limit: int
) -> None:
    made = prompter(tokenizers[kind], limit)
    whole = made._encode_now(text, False, True)[:limit]
    assert made.foreign(text).tolist() == whole.tolist()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(text=TEXTS)
def test_every_place_splits_the_tokens(tokenizers: dict[str, Any], kind: str, text: str) -> None:
    text = f"The mayor, of Bore's\nriver! 市長 is\nx 12345 <search> kelu </search>\n{text}"
    made = prompter(tokenizers[kind], 9)
    places = Truncation(tokenizers[kind].get_vocab())
    ends = {places.end(text, chars) for chars in range(len(text))}
    assert len(ends) > 6
    whole = made._encode_now(text, False, True).tolist()
    for end in ends:
        left = made._encode_now(text[:end], False, True).tolist()
        assert whole[: len(left)] == left


def test_a_page_costs_what_is_kept_of_it(bpe_tokenizer: Any) -> None:
    made, seen = prompter(bpe_tokenizer, 160), list[int]()
    encode = made._tokenizer.encode

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(bpe_tokenizer, name)

        def encode(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return encode(text, **options)

    made._tokenizer = Counting()
    page = "the mayor of bore is kelu .\n" * 20_000
    assert len(made.foreign(page)) == 160 and sum(seen) < 3000 < len(page)
    seen.clear()
    made.foreign(page)
    assert not seen  # cached


@pytest.mark.slow
@pytest.mark.parametrize("spaced", [True, False])
def test_cached_texts_are_bounded_in_memory(bpe_tokenizer: Any, spaced: bool) -> None:
    made, word = prompter(bpe_tokenizer, 20), "mayor " if spaced else "mayor"
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(100):
        made.foreign(f"{number}{word * 4000}")
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kept < 500_000  # 100 pages of 24 kB: 2.4 MB


@pytest.mark.parametrize("entry", ["a b", "aĠb", "a▁b"])
def test_a_vocabulary_that_spans_spaces_is_never_cut_at_one(entry: str) -> None:
    assert Truncation(["a", "b", entry]).end("a b a b a b", 2) == 11
    assert Truncation(["a", "b"]).end("a b a b a b", 2) == 3
    assert Truncation([]).end("a b a b a b", 2) == 11


def test_a_vocabulary_that_spans_newlines_is_never_cut_at_one() -> None:
    assert Truncation(["Ċ", "Ċa"]).end("a\na\na", 1) == 5
    assert Truncation(["Ċ", "aĊ", "ĊĊ"]).end("a\na\na", 1) == 2
    assert Truncation(["a"]).end("a\na\na", 1) == 5  # newlines may be made spaces
