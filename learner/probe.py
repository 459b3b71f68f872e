"""The probe: the same few tokens under every version, which check the weights where they serve."""

import random

from transformers import PreTrainedTokenizerBase

from learner.errors import BadModel


def draw_probe(tokenizer: PreTrainedTokenizerBase, seed: int, count: int) -> tuple[int, ...]:
    """`count` ids drawn by the run's seed from the non-special vocabulary, with replacement.

    Raises BadModel when the vocabulary has nothing but special tokens.
    """
    vocabulary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    if not vocabulary:
        raise BadModel(f"tokenizer {tokenizer.name_or_path!r} has no token that is not special")
    return tuple(random.Random(f"probe {seed}").choices(vocabulary, k=count))
