"""Tiny models of KerasHub, with tokenizers that are trained here on a few sentences."""

from __future__ import annotations

import io
from typing import Any

import keras
import numpy as np

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "a model of one device gives the same numbers",
    "shards of weights are gathered before they are read",
    "the trainer never asks which strategy it has",
    "tokens of one example do not see another example",
    "a long sentence about dogs and foxes and devices",
    "short one",
    "the last of the eight sentences",
]
SIZE = {"num_layers": 2, "intermediate_dim": 64}


def _pieces(**options: Any) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 4), model_writer=model, vocab_size=80, model_type="WORD",
        pad_id=0, eos_id=1, bos_id=2, unk_id=3, hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return model.getvalue()


def causal_lm(family: str, dtype: str | None = None, length: int = 16) -> keras.Model:
    """Returns an uncompiled task of `"gpt2"`, `"llama"` or `"gemma"` with a preprocessor."""
    import keras_hub.models as hub

    options = SIZE | {"dtype": dtype}
    if family == "gpt2":
        letters = sorted(set("".join(TEXTS).replace(" ", "\u0120")))
        tokens = ["<|endoftext|>", *letters, "th", "the"]
        tokenizer = hub.GPT2Tokenizer(
            {token: number for number, token in enumerate(tokens)}, ["t h", "th e"]
        )
        backbone = hub.GPT2Backbone(
            vocabulary_size=len(tokens),
            num_heads=4,
            hidden_dim=32,
            max_sequence_length=32,
            **options,
        )
        preprocessor = hub.GPT2CausalLMPreprocessor(tokenizer, sequence_length=length)
        return hub.GPT2CausalLM(backbone, preprocessor, compile=False)
    if family == "llama":
        tokenizer = hub.LlamaTokenizer(_pieces(bos_piece="<s>", eos_piece="</s>"))
        backbone = hub.LlamaBackbone(
            vocabulary_size=tokenizer.vocabulary_size(), num_query_heads=4, hidden_dim=32,
            num_key_value_heads=2, **options,
        )  # fmt: skip
        preprocessor = hub.LlamaCausalLMPreprocessor(tokenizer, sequence_length=length)
        return hub.LlamaCausalLM(backbone, preprocessor, compile=False)
    tokenizer = hub.GemmaTokenizer(
        _pieces(bos_piece="<bos>", eos_piece="<eos>", pad_piece="<pad>",
                user_defined_symbols=["<start_of_turn>", "<end_of_turn>"])
    )  # fmt: skip
    backbone = hub.GemmaBackbone(
        vocabulary_size=tokenizer.vocabulary_size(), num_query_heads=4, num_key_value_heads=1,
        hidden_dim=32, head_dim=8, **options,
    )  # fmt: skip
    preprocessor = hub.GemmaCausalLMPreprocessor(tokenizer, sequence_length=length)
    return hub.GemmaCausalLM(backbone, preprocessor, compile=False)


def bert_classifier(dtype: str | None = None, num_classes: int = 3) -> keras.Model:
    """Returns an uncompiled classifier of texts with `num_classes` classes."""
    import keras_hub.models as hub

    words = sorted(set(" ".join(TEXTS).split()))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    backbone = hub.BertBackbone(
        vocabulary_size=len(vocabulary), num_heads=4, hidden_dim=32, max_sequence_length=16,
        dtype=dtype, **SIZE,
    )  # fmt: skip
    preprocessor = hub.BertTextClassifierPreprocessor(
        hub.BertTokenizer(vocabulary), sequence_length=16
    )
    return hub.BertTextClassifier(
        backbone, num_classes=num_classes, preprocessor=preprocessor, dropout=0.0, compile=False
    )


def model(family: str, dtype: str | None = None) -> keras.Model:
    """Returns a task: a language model, or the classifier of `"bert"`."""
    return bert_classifier(dtype) if family == "bert" else causal_lm(family, dtype)


def labels(num_classes: int = 3) -> np.ndarray:
    """Returns a class for each of `TEXTS`."""
    return np.arange(len(TEXTS)) % num_classes
