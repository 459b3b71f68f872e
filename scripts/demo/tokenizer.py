"""The demo's vocabulary, written down rather than trained, and the tokenizer made of it.

Tags are single, non-special added tokens: they survive decoding, and stop strings see them. A name
is two tokens, `xa ##nu`. Decoding what was encoded gives the same text back, single spaces
included.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scripts.demo.world import RELATIONS, SYLLABLES

PAD, UNKNOWN, END = "[PAD]", "[UNK]", "[EOS]"
TAGS = (
    "<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>",
    "<think>", "</think>",
)  # fmt: skip
CORRECTION = "try again ."
WORDS = (
    "what", "is", "the", "of", "has", "?", ".", "try", "again",
    *RELATIONS, *(relation for group in RELATIONS.values() for relation in group),
)  # fmt: skip
VOCABULARY = (PAD, UNKNOWN, END, *TAGS, *WORDS, *SYLLABLES, *(f"##{s}" for s in SYLLABLES))
IDS = {token: number for number, token in enumerate(VOCABULARY)}


def make_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """The tokenizer: words split at white space, names into syllables; encoding adds nothing."""
    backend = Tokenizer(models.WordPiece(vocab=dict(IDS), unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )


def save_tokenizer(folder: Path, max_tokens: int) -> None:
    """Write the tokenizer's files beside the model's."""
    make_tokenizer(max_tokens).save_pretrained(folder)


def encode(text: str) -> list[int]:
    """The tokenizer's ids for text of the world, thousands of times faster than a call of it."""
    tokens: list[int] = []
    for word in text.split():
        known = IDS.get(word)
        tokens += (known,) if known is not None else (IDS[word[:2]], IDS[f"##{word[2:]}"])
    return tokens


def decode(tokens: list[int]) -> str:
    """The text of `tokens`: `##` glues to what stands before."""
    return " ".join(VOCABULARY[token] for token in tokens).replace(" ##", "")
