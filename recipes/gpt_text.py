"""A small GPT on text, with bytes as tokens.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; the small text
is Python's `help()` on the language: half a million bytes of English and code.

Command:   python -m tfdist.train --recipe gpt_text --data small --set size=mini --epochs 4
           --data FOLDER reads text files of any size, --set size=medium --set remat=true trains
           GPT-2's 350 million weights
Hardware:  GPUs for `small` and `medium`; two CPU cores for `mini`
Result:    2.52 nats per byte of held-out text after 4 epochs on the small set (a uniform guess:
           5.55), in 140 s of CPU time on two cores
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import keras
import tensorflow as tf
from pydantic import BaseModel, Field

import pipelines
from pipelines.maps import text
from tfdist import data, models, optimizers, schedules, train
from tfdist.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {
    "data": "tfds:tiny_shakespeare",
    "epochs": 10,
    "batch_size": 32,
    "learning_rate": 1e-3,
    "lr_rule": "cosine",
    "warmup_epochs": 1,
}
#: Overrides for `--smoke`.
SMOKE: Mapping[str, Any] = {"batch_size": 8, "set": {"size": "tiny", "length": 32}}

_VOCABULARY_SIZE = text.END + 1  # bytes, and the end of a document
_SHUFFLED_ROWS, _VALIDATION_STEPS = 2048, 20


class Hyperparameters(BaseModel):
    """Hyperparameters, which `--set NAME=VALUE` sets."""

    size: Literal["tiny", "mini", "small", "medium"] = "small"
    length: int = Field(128, ge=2)  # tokens per sequence
    dropout: float = Field(0.0, ge=0, lt=1)
    remat: bool = False  # activation checkpointing of each block
    steps_per_epoch: int = Field(100, ge=1)


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled network; its loss is in nats per byte."""
    hp = Hyperparameters.model_validate(config.set)
    model = models.gpt(
        _VOCABULARY_SIZE,
        hp.length,
        size=hp.size,
        dropout=hp.dropout,
        remat=hp.remat,
    )
    model.compile(
        optimizer=optimizers.create(config, schedules.learning_rate(config, steps_per_epoch)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=config.jit_compile,
        run_eagerly=config.run_eagerly,
    )
    return model


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches of tokens and the next tokens, both int32 `(batch, length)`."""
    hp = Hyperparameters.model_validate(config.set)
    return _rows(config, "train").shuffle(_SHUFFLED_ROWS, config.seed).batch(
        config.batch_size, drop_remainder=True
    ).repeat().take(hp.steps_per_epoch)  # fmt: skip


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns a fixed number of batches of held-out text, always the same."""
    rows = _rows(config, "validation").repeat()
    return rows.batch(config.batch_size, drop_remainder=True).take(_VALIDATION_STEPS)


def _rows(config: TrainConfig, split: str) -> tf.data.Dataset:
    """Concatenates documents, and returns sequences of tokens with the next token of each."""
    length = Hyperparameters.model_validate(config.set).length
    if config.data == data.SYNTHETIC:
        tokens = data.Noise((length + 1,), "int32", _VOCABULARY_SIZE)
        noise = tf.data.Dataset.from_tensor_slices(tokens.drawn(config.seed, 4 * config.batch_size))
        return noise.map(_shifted)
    documents = pipelines.read(
        data.folder(config, _DATA, split),
        1,
        shuffle_buffer=_SHUFFLED_ROWS if split == "train" else 0,
        seed=config.seed,
        tuning=data.with_flags(pipelines.Tuning(), config),
        map_fn=lambda example: text.byte_tokens(example["text"]),
    )
    return text.pack(documents, length + 1).map(_shifted)


def _shifted(tokens: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tokens[:-1], tokens[1:]


def _examples(split: str) -> Iterator[dict[str, object]]:
    """Yields the topics of Python's help, of which a tenth is held out."""
    from pydoc_data.topics import topics

    for number, name in enumerate(sorted(topics)):
        if (number % 10 == 0) == (split == "validation"):
            yield {"text": topics[name]}


_DATA = data.DataSet(
    name="text",
    features={"text": None},
    small=data.Small(
        "the topics of Python's help",
        (pipelines.Feature(name="text", dtype="string", encoding="bytes"),),
        _examples,
    ),
)


if __name__ == "__main__":
    sys.exit(train.main(["--recipe", __file__, *sys.argv[1:]]))
