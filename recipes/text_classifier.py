"""Your own texts in one folder per class: learns a vocabulary and trains a small network.

The folder determines the classes and the splits. Each file is an example or, with
`--set lines=true`, each line.

Command:   python -m tfdist.train --recipe text_classifier --data reviews/ --strategy mirrored
           with reviews/good/1.txt, reviews/bad/2.txt, ..., or both in train/ and validation/
Network:   the mean of word embeddings; --set network=lstm reads the words in order
Try it:    ... --data small: English and Python, from this Python's help and library
Result:    93 % validation accuracy after 5 epochs with --data small
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from pydantic import Field

import pipelines
from recipes import _class_folders, _plots, _settings
from tfdist import data, models, optimizers, schedules, train
from tfdist.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {
    "epochs": 10,
    "batch_size": 64,
    "learning_rate": 2e-3,
    "lr_rule": "cosine",
}
#: Overrides for `--smoke`.
SMOKE: Mapping[str, Any] = {
    "batch_size": 8,
    "set": {"length": 32, "width": 16, "vocabulary_size": 1000},
}


_UNKNOWN = 1  # TextVectorization's code of words outside of the vocabulary


class Hyperparameters(_settings.TextSettings):
    """Hyperparameters, which `--set NAME=VALUE` sets."""

    network: Literal["mean", "lstm"] = "mean"
    lines: bool = False  # each line of a file is an example, not each file
    vocabulary_size: int = Field(20_000, ge=10)  # the most frequent words
    length: int = Field(256, ge=1)  # words per text; longer texts are truncated
    width: int = Field(64, ge=1)  # of the word embedding
    dropout: float = Field(0.3, ge=0, lt=1)
    class_weights: Literal["none", "balanced"] = "none"
    classes: int = Field(2, ge=2)  # number of classes of --data synthetic


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled network, from word numbers to one logit per class."""
    hp, num_classes = Hyperparameters.model_validate(config.set), len(_classes(config))
    if hp.network == "lstm":
        model = models.lstm(
            hp.vocabulary_size, num_classes,
            width=hp.width, units=hp.width, depth=1, dropout=hp.dropout, mask_zero=True,
        )  # fmt: skip
    else:
        words = keras.Input((None,), dtype="int32")
        x = layers.Embedding(hp.vocabulary_size, hp.width, mask_zero=True)(words)
        x = layers.GlobalAveragePooling1D()(x)
        x = layers.Dropout(hp.dropout)(x)
        x = layers.Dense(hp.width, activation="relu")(x)
        model = keras.Model(words, layers.Dense(num_classes, dtype="float32", name="logits")(x))
    model.compile(
        optimizer=optimizers.create(config, schedules.learning_rate(config, steps_per_epoch)),
        loss=keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=config.label_smoothing
        ),
        metrics=["accuracy"],
        jit_compile=config.jit_compile,
        run_eagerly=config.run_eagerly,
    )
    return model


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches `(words, one-hot labels)`, and weights with class_weights.

    Words are int32 `(batch, length)`, 0 after the end of a text.
    """
    batches = _read(config, "train")
    hp = Hyperparameters.model_validate(config.set)
    if hp.class_weights == "none" or config.data == data.SYNTHETIC:
        return batches
    return _class_folders.with_class_weights(batches, _folders(config))


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns the held-out texts as `(words, one-hot labels)`, in a fixed order."""
    return _read(config, "validation")


def report(config: TrainConfig, model: keras.Model, folder: Path) -> list[str]:
    """Writes the vocabulary, one word per line, and draws the confusion matrix."""
    labels, predicted = [], []
    for words, one_hot in validation_data(config).take(3 if config.smoke else -1):
        labels.extend(one_hot.numpy().argmax(-1))
        predicted.extend(np.asarray(model(words, training=False)).argmax(-1))
    _plots.confusion_matrix(
        np.array(labels), np.array(predicted), _classes(config), folder / "confusion_matrix.png"
    )
    if config.data == data.SYNTHETIC:
        return ["confusion_matrix.png"]
    vocabulary = _vectorizer(config).get_vocabulary(include_special_tokens=False)
    (folder / "vocabulary.txt").write_text("\n".join(vocabulary) + "\n", "utf-8")
    return ["confusion_matrix.png", "vocabulary.txt"]


def _read(config: TrainConfig, split: str) -> tf.data.Dataset:
    hp, num_classes = Hyperparameters.model_validate(config.set), len(_classes(config))
    if config.data == data.SYNTHETIC:
        noise = data.DataSet(
            name="text_classifier",
            noise=(
                data.Noise((hp.length,), "int32", hp.vocabulary_size),
                data.Noise((), "int64", num_classes),
            ),
            num_examples={"train": 2048, "validation": 512},
        )
        return data.read(
            config, noise, split, batch_fn=lambda x, y: (x, tf.one_hot(y, num_classes))
        )
    folders, is_training, vectorize = _folders(config), split == "train", _vectorizer(config)

    def to_words(batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        words = tf.cast(vectorize(batch["text"]), tf.int32)
        # The mean of no words would be NaN: a text without words is one unknown word.
        first = tf.where(words[:, :1] == 0, _UNKNOWN, words[:, :1])
        return tf.concat([first, words[:, 1:]], 1), tf.one_hot(batch["label"], num_classes)

    return pipelines.read(
        folders.train if is_training else folders.validation,
        config.batch_size,
        shuffle_buffer=10_000 if is_training else 0,
        seed=config.seed,
        batch_fn=to_words,
    )


def _vectorizer(config: TrainConfig) -> layers.TextVectorization:
    hp = Hyperparameters.model_validate(config.set)
    return _adapted(_folders(config).train, hp.vocabulary_size, hp.length)


@functools.lru_cache(maxsize=2)
def _adapted(folder: Path, vocabulary_size: int, length: int) -> layers.TextVectorization:
    """Returns a layer adapted to the most frequent words of the training texts."""
    with tf.device("CPU:0"):
        vectorize = layers.TextVectorization(vocabulary_size, output_sequence_length=length)
        vectorize.adapt(pipelines.read(folder, 256, batch_fn=lambda batch: batch["text"]))
    return vectorize


def _classes(config: TrainConfig) -> tuple[str, ...]:
    if config.data == data.SYNTHETIC:
        return tuple(map(str, range(Hyperparameters.model_validate(config.set).classes)))
    return _folders(config).classes


def _folders(config: TrainConfig) -> _class_folders.ClassFolders:
    hp = Hyperparameters.model_validate(config.set)
    options: dict[str, Any] = {"kind": "text"} | ({} if hp.lines else {"whole_files": True})
    options |= {"encoding": hp.encoding} if hp.encoding else {}
    options |= {"splits": hp.splits} if hp.splits else {}
    return _class_folders.prepare(config, "text_classifier", _SMALL, **options)


def _examples(split: str) -> Iterator[dict[str, object]]:
    """Yields paragraphs of Python's help (class 0) and of a module's source (class 1)."""
    import argparse
    import inspect
    from pydoc_data.topics import topics

    texts = ["\n".join(topics[name] for name in sorted(topics)), inspect.getsource(argparse)]
    for label, text in enumerate(texts):
        paragraphs = [p for p in text.split("\n\n") if len(p.split()) > 5][:600]
        for number, paragraph in enumerate(paragraphs):
            if (number % 5 == 4) == (split == "validation"):
                yield {"text": paragraph, "label": label}


_SMALL = data.Small(
    "paragraphs of English and of Python",
    (
        pipelines.Feature(name="text", dtype="string", encoding="bytes"),
        pipelines.Feature(
            name="label", dtype="int64", encoding="list", label_names=("English", "Python")
        ),
    ),
    _examples,
)


if __name__ == "__main__":
    sys.exit(train.main(["--recipe", __file__, *sys.argv[1:]]))
