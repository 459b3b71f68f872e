"""An encoder of MiniLM-L6's shape for `scripts/bench_retrieval.py`: speed is its own, weights not.

Six layers, hidden 384, 12 heads, intermediate 1536, random weights (seeded), a real WordPiece
vocabulary trained on the corpus; a folder as sentence-transformers leaves it. No model can be
fetched where the benchmark must run, and speed does not depend on what was learnt. Consumes texts;
waits for nothing.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 30_522
SHAPE = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
_NAMES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_USE = {  # as sentence-transformers says it
    "modules.json": [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(
            {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}.items()
        )
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": SHAPE["hidden_size"],
        "pooling_mode_mean_tokens": True,
    },
}


def make_encoder(folder: Path, texts: Iterable[str]) -> Path:
    """The encoder in `folder`, made where it is missing, its vocabulary from `texts`."""
    if folder.exists():
        return folder
    import torch
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    new = folder.with_name(f"{folder.name}.{os.getpid()}")
    words = dict(zip(_NAMES, _SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_word_pieces(texts), **words)
    tokenizer.model_max_length = SHAPE["max_position_embeddings"]
    tokenizer.save_pretrained(new)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokenizer), **SHAPE)).eval().save_pretrained(new)
    for path, contents in _USE.items():
        (new / path).parent.mkdir(exist_ok=True)
        (new / path).write_text(json.dumps(contents), encoding="utf-8")
    new.rename(folder)
    return folder


def _word_pieces(texts: Iterable[str]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=list(_SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(word, tokenizer.token_to_id(word)) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    return tokenizer
