"""The probe's ids: drawn by the seed, never special."""

from typing import Any

from learner.run import draw_probe


def test_drawn_once_by_the_seed_from_what_is_not_special(word_tokenizer: Any) -> None:
    probe = draw_probe(word_tokenizer, seed=3, count=500)
    assert probe == draw_probe(word_tokenizer, seed=3, count=500)
    assert probe != draw_probe(word_tokenizer, seed=4, count=500)
    special = set(word_tokenizer.all_special_ids)
    assert set(probe) == set(range(len(word_tokenizer))) - special
