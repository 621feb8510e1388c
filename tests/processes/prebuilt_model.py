"""A script that builds its models before the Trainer; run alone and as a worker.

Arguments: the strategy, or `plain`.
"""

from __future__ import annotations

import sys

import keras
import numpy as np

import tfdist


def main(strategy: str) -> None:
    """Trains two models, and prints the metrics on rank 0."""
    keras.utils.set_random_seed(1)
    texts = np.array([f"word{i % 7} word{i % 3}" for i in range(24)])
    words = keras.layers.TextVectorization(20, output_sequence_length=3)
    words.adapt(texts)
    for _ in range(2):
        model = keras.Sequential(
            [
                keras.layers.Embedding(20, 4),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
        trainer = model if strategy == "plain" else tfdist.Trainer(model, strategy=strategy)
        history = trainer.fit(words(texts), np.arange(24) % 2, batch_size=8, epochs=2, verbose=0)
        if tfdist.is_chief():
            print("losses", *(f"{loss:.5f}" for loss in history.history["loss"]))


if __name__ == "__main__":
    main(sys.argv[1])
