"""Small real encoders on disk, for tests: BERT's architecture with random weights."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_encoder(folder: Path, seed: int = 0, **sentence_transformers: object) -> Path:
    """Save one; a text's letters are its tokens. `modules`, `pooling`, `prompts`: the contents of
    the files that sentence-transformers leaves beside a model.
    """
    config = _write_parts(folder)
    torch.manual_seed(seed)
    BertModel(config).save_pretrained(folder)
    files = {
        "modules.json": sentence_transformers.get("modules"),
        "1_Pooling/config.json": sentence_transformers.get("pooling"),
        "config_sentence_transformers.json": sentence_transformers.get("prompts"),
    }
    for name, content in files.items():
        if content is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content))
    return folder


def make_reranker(folder: Path, seed: int = 0, labels: int = 1) -> Path:
    """Save a cross-encoder over the same tokens."""
    config = _write_parts(folder)
    config.num_labels = labels
    torch.manual_seed(seed)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def _write_parts(folder: Path) -> BertConfig:
    """Save the tokenizer; returns the sizes."""
    letters = [f"{mark}{chr(c)}" for c in range(33, 127) for mark in ("", "##")]
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *letters))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return BertConfig(
        vocab_size=len(vocabulary), num_hidden_layers=2, max_position_embeddings=64, **sizes
    )


def pickled(canary: Path) -> bytes:
    """A pickle that makes a file when it is read."""
    return f"cbuiltins\nopen\n(V{canary}\nVw\ntR.".encode()
